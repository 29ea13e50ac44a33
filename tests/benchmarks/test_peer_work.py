"""The parts of benchmarks/peer_trl.py that can be wrong without anybody noticing."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.peer_work import Work, endless, speedups, step_flops
from torchtitan_rl.models.makers.tiny import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("peer") / "tiny", seed=0)


def test_a_step_takes_four_times_the_operations_of_generating_it(folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(folder), attn_implementation="eager")
    prompt, new = 5, 3
    cache = None
    # Token by token, each attends to those before it only, which a mask would not save.
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for position in range(prompt + new - 1):
            ask = model.model if position < prompt - 1 else model
            cache = ask(torch.tensor([[7]]), past_key_values=cache, use_cache=True).past_key_values
    config = json.loads((folder / "config.json").read_text())
    assert step_flops(config, [prompt], new) == pytest.approx(
        4 * counter.get_total_flops(), rel=1e-3
    )
    assert step_flops(config, [prompt] * 6, new) == 6 * step_flops(config, [prompt], new)


def test_a_completion_never_ends_and_prompts_stay_as_they_were(folder, tmp_path):
    from transformers import AutoTokenizer

    changed = endless(folder, tmp_path / "endless")
    config = json.loads((changed / "config.json").read_text())
    before, after = (AutoTokenizer.from_pretrained(str(f)) for f in (folder, changed))
    generation = json.loads((changed / "generation_config.json").read_text())
    assert generation["eos_token_id"] == after.eos_token_id == config["vocab_size"]
    messages = Work(model="", steps=1).messages(0)
    shown = [t.apply_chat_template(messages, add_generation_prompt=True) for t in (before, after)]
    assert shown[0]["input_ids"] == shown[1]["input_ids"]


def test_a_run_is_compared_with_the_two_beside_it():
    """Here the machine slows down to half its speed meanwhile, and once has a hiccup."""
    runs = [
        *(("ours", [1.0, 1.0, 9.0]), ("TRL", [3.0, 30.0, 3.0]), ("ours", [1.0, 1.0, 1.0])),
        *(("kept", [2.0, 2.0]), ("ours", [2.0, 2.0, 2.0]), ("TRL", [6.0]), ("ours", [2.0])),
    ]
    assert speedups(runs, "TRL") == [3.0, 3.0]
    assert speedups(runs, "kept") == [pytest.approx(2 / 1.5)]
