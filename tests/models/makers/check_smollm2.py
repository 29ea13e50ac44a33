"""The real SmolLM2-135M-Instruct in every part of the stack. Not in `make test`, which fetches
nothing: `make model`, then `.venv/bin/python -m pytest tests/models/check_smollm2.py`."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.support import forward, titan_model
from torchtitan_rl.actors.generator import VLLMGenerator
from torchtitan_rl.config import EngineConfig, SamplingConfig
from torchtitan_rl.config.models import SMOLLM2_FOLDER
from torchtitan_rl.models.makers.smollm2 import ANSWER, PARAMETERS, QUESTION, check_files
from torchtitan_rl.rollout.renderer import ChatRenderer
from torchtitan_rl.supervision.spawn import spawn_generator

MODEL = Path(__file__).parents[3] / SMOLLM2_FOLDER
ASKED = [{"role": "user", "content": QUESTION}]
TALK = [
    {"role": "system", "content": "Be brief."},
    *ASKED,
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "And 12 + 2024?\n\n1. or 2.?"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def test_it_is_whole():
    check_files(MODEL, parameters=PARAMETERS)


def test_torchtitan_computes_what_transformers_computes(tokenizer):
    tokens = torch.tensor([ChatRenderer(MODEL).prompt(TALK)])
    reference = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    assert reference.lm_head.weight is reference.model.embed_tokens.weight
    with torch.no_grad():
        expected = reference(tokens).logits
        logits = forward(titan_model(MODEL), tokens)
    assert expected.std() > 1
    print(f"largest difference {(logits - expected).abs().max():.1e} of {expected.std():.1f}")
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("messages", [ASKED, TALK[:2], TALK])
def test_the_renderer_says_what_its_chat_template_says(tokenizer, messages):
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert ChatRenderer(MODEL).prompt(messages) == expected


def test_numbers_are_read_digit_by_digit(tokenizer):
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("is\n\n12,  345"))
    assert pieces == ["is", "ĊĊ", "1", "2", ",", "ĠĠ", "3", "4", "5"]


async def test_vllm_says_what_transformers_says():
    engine = EngineConfig(max_model_len=256, kv_cache_gib=0.2)
    generator = await spawn_generator(VLLMGenerator.Config(engine=engine), model=str(MODEL), seed=0)
    try:
        sampling = SamplingConfig(temperature=0.0, max_tokens=24)
        [completion] = await generator.actor.generate.call_one(
            [ChatRenderer(MODEL).prompt(ASKED)], sampling_config=sampling
        )
    finally:
        await generator.stop()
    assert (completion.text, completion.finish_reason) == (ANSWER, "stop")
    message, calls = ChatRenderer(MODEL).parse(completion.token_ids)
    assert (message["content"], calls) == (ANSWER, [])
