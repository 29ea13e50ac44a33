"""The tiny starting model, its tokenizer and renderer, and folders that are written whole."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer

from torchtitan_rl.models.hf import (
    COMPANION_FILES,
    ModelFolderError,
    atomic_folder,
    copy_companion_files,
)
from torchtitan_rl.models.makers.tiny import (
    CALL_PIECES,
    CHAT_TOKENS,
    TINY_QWEN3,
    byte_tokenizer,
    write_tiny_model,
)
from torchtitan_rl.rollout.renderer import ChatRenderer

QUESTION = [{"role": "user", "content": "47 85"}]


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def renderer(tiny_model):
    return ChatRenderer(tiny_model)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tmp_path):
    first, again, other = (
        contents(write_tiny_model(tmp_path / name, seed=seed))
        for name, seed in (("first", 5), ("again", 5), ("other", 6))
    )
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_it_has_about_600_000_parameters_and_config_and_tokenizer_beside_them(tiny_model):
    weights = load_file(tiny_model / "model.safetensors")
    assert 550_000 < sum(weight.numel() for weight in weights.values()) < 650_000
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= contents(tiny_model).keys()


def test_the_vocabulary_of_the_config_holds_every_token(tiny_model, tokenizer):
    config = json.loads((tiny_model / "config.json").read_text())
    assert len(tokenizer) <= config["vocab_size"]
    assert config["vocab_size"] % 16 == 0
    assert config["eos_token_id"] == tokenizer.eos_token_id


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("roles", ["user", "system user", "system user assistant user"])
def test_its_chat_template_says_what_the_renderer_does(tiny_model, tokenizer, thinking, roles):
    messages = [{"role": role, "content": f"{i} {role}"} for i, role in enumerate(roles.split())]
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
    )
    assert ids == ChatRenderer(tiny_model, thinking=thinking).prompt(messages)


any_text = st.text(max_size=60)


@settings(deadline=None)
@given(parts=st.lists(any_text | st.sampled_from(CHAT_TOKENS), max_size=5))
def test_any_text_survives_the_tokenizer(tokenizer, parts):
    text = "".join(parts)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@settings(deadline=None)
@given(
    text=any_text.filter(
        lambda text: not any(token in text for token in (*CHAT_TOKENS, *CALL_PIECES))
    )
)
def test_text_without_tokens_of_its_own_is_one_token_a_byte(tokenizer, text):
    assert len(tokenizer.encode(text, add_special_tokens=False)) == len(text.encode())


@pytest.mark.parametrize("token", CHAT_TOKENS)
def test_each_chat_token_is_one_token_with_a_stable_id(tokenizer, token):
    expected = [256 + CHAT_TOKENS.index(token)]
    assert tokenizer.encode(token, add_special_tokens=False) == expected
    assert byte_tokenizer().encode(token).ids == expected


def test_the_tokenizer_loads_with_the_right_special_tokens(tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.model_max_length == TINY_QWEN3["max_position_embeddings"]


def test_a_prompt_ends_where_the_models_turn_starts(renderer):
    assert renderer.tokenizer.decode(renderer.prompt(QUESTION)) == (
        "<|im_start|>user\n47 85<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_thinking_prompt_leaves_the_thinking_to_the_model(tiny_model):
    thinking = ChatRenderer(tiny_model, thinking=True)
    assert thinking.tokenizer.decode(thinking.prompt(QUESTION)).endswith(
        "<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_completion_is_its_text_and_the_end_of_turn(renderer):
    *text, end = renderer.reply({"role": "assistant", "content": "4+7 [ANSWER] 11"})
    assert renderer.tokenizer.decode(text) == "4+7 [ANSWER] 11"
    assert end == renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_a_folder_without_a_tokenizer_is_refused_by_name(tiny_model, tmp_path):
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    with pytest.raises(ModelFolderError, match=f"{tmp_path} has no tokenizer"):
        ChatRenderer(tmp_path)


def test_atomic_folder_appears_when_it_is_whole(tmp_path):
    final = tmp_path / "deep" / "model"
    with atomic_folder(final) as temporary:
        (temporary / "weights").write_text("new")
        assert not final.exists()
    assert contents(final) == {"weights": b"new"}
    assert list(final.parent.iterdir()) == [final]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("before", [None, "old"])
def test_atomic_folder_leaves_what_was_there_when_the_block_fails(tmp_path, error, before):
    final = tmp_path / "model"
    if before:
        final.mkdir()
        (final / "weights").write_text(before)

    def write_half():
        with atomic_folder(final) as temporary:
            (temporary / "weights").write_text("half")
            raise error

    with pytest.raises(error):
        write_half()
    assert list(tmp_path.iterdir()) == ([final] if before else [])
    assert not before or contents(final) == {"weights": b"old"}


def test_atomic_folder_replaces_a_folder_and_keeps_nothing_of_it(tmp_path):
    final = tmp_path / "model"
    final.mkdir()
    (final / "stale").write_text("old")
    with atomic_folder(final) as temporary:
        (temporary / "weights").write_text("new")
    assert contents(final) == {"weights": b"new"}
    assert list(tmp_path.iterdir()) == [final]


def test_companion_files_are_all_of_a_folder_but_its_weights(tiny_model, tmp_path):
    copy_companion_files(tiny_model, tmp_path)
    source = contents(tiny_model)
    assert contents(tmp_path) == {n: source[n] for n in COMPANION_FILES if n in source}
    assert source.keys() - contents(tmp_path).keys() == {"model.safetensors"}
