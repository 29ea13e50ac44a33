"""What vLLM decides on GPUs for the generators of every recipe."""

import json
import os
import subprocess
import sys

import pytest

from tests.cuda.pretend import CAPABILITIES
from torchtitan_rl.platform import worker_env
from torchtitan_rl.recipes.registry import built_in_recipes

GIB = 2**30
FREE = 50
"""GiB of each GPU that nobody uses, in engine_settings.py."""


@pytest.fixture(scope="module")
def decided(tmp_path_factory):
    env = {**os.environ, **worker_env(1, role="generator")}
    run = subprocess.run(
        [sys.executable, "-m", "tests.cuda.engine_settings", str(tmp_path_factory.mktemp("m"))],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
def test_every_recipes_engine_runs_as_vllm_runs_best(decided, capability):
    assert set(decided[str(capability)]) == set(built_in_recipes())
    for name, made in decided[str(capability)].items():
        config = built_in_recipes()[name]().generator
        degree = config.tensor_parallel_degree
        expected = {
            "runner": 2,
            # A batch is scheduled before the one before is read: see Engine._finish_batches.
            "scheduler": "AsyncScheduler",
            "batches": 2,
            "executor": "uni" if degree == 1 else "mp",
            "worker": "vllm.v1.worker.gpu_worker",
            "ranks": degree,
            "dtype": "torch.bfloat16",
            "graphs": "FULL_AND_PIECEWISE",
            "kv_cache": int(config.engine.kv_cache_gib * GIB),
            "prefix_caching": True,
            "routing": name == "grpo_sum_digits_moe_tiny",
            "logprobs": "processed_logprobs",
        }
        assert {key: made[key] for key in expected} == expected, name
        assert made["largest_graph"] >= config.engine.max_num_seqs, name


def test_an_engine_asks_for_the_memory_that_it_takes(decided):
    """vLLM would ask for 92 % of a GPU, and refuse one of which others use more than 8 %."""
    asked = {name: made["memory"] / GIB for name, made in decided["(9, 0)"].items()}
    assert max(asked.values()) < FREE
    assert asked["grpo_sum_digits_tiny"] == pytest.approx(0.0625 + 2, abs=0.01)
    # 0.6e9 and 14.8e9 / 4 parameters in bf16, the KV cache, and 2 GiB.
    assert asked["grpo_sum_digits_qwen3_0_6b"] == pytest.approx(1.1 + 16 + 2, abs=0.1)
    assert asked["grpo_sum_digits_qwen3_14b"] == pytest.approx(6.9 + 32 + 2, abs=0.1)


def test_vllm_runs_on_gpus_as_it_comes(decided):
    assert decided["changed"] == []
