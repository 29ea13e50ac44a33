"""The generator on the real engine, through Monarch."""

import math
import os
from pathlib import Path

import pytest
from monarch.actor import ActorError

from tests.support import small_engine
from torchtitan_rl.actors.generator import VLLMGenerator
from torchtitan_rl.config import SamplingConfig
from torchtitan_rl.core.seeds import sample_seed
from torchtitan_rl.hosts.watched import started_by
from torchtitan_rl.supervision.spawn import spawn_generator

PROMPT = list(range(40))  # longer than a KV block, so that its prefix is cached


@pytest.fixture(scope="module")
async def spawned(tiny_model):
    config = VLLMGenerator.Config(
        sampling=SamplingConfig(n=3, max_tokens=8), engine=small_engine(), threads=1
    )
    spawned = await spawn_generator(config, model=str(tiny_model), seed=5)
    yield spawned
    await spawned.stop()


@pytest.fixture(scope="module")
def generator(spawned):
    return spawned.actor


async def test_locks_of_the_engine_have_no_name_while_they_are_used(spawned):
    """One with a name in /dev/shm would stay there if its process is killed."""
    await spawned.actor.generate.call_one([PROMPT])
    family = [*spawned.processes, *started_by(spawned.processes)]
    lines = [
        line.split()
        for process in family
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        if "/dev/shm/" in line
    ]
    assert lines
    # By their inodes: a lock is made under another name than it has.
    assert {int(line[4]) for line in lines}.isdisjoint(
        file.inode() for file in os.scandir("/dev/shm")
    )


async def test_completions_are_flat_and_ordered_by_prompt_then_sample(generator):
    completions = await generator.generate.call_one([PROMPT, "text is a prompt too"])
    assert [c.prompt_idx for c in completions] == [0, 0, 0, 1, 1, 1]
    for c in completions:
        assert c.policy_version == 0
        assert len(c.token_ids) == len(c.token_logprobs) <= 8
        assert all(math.isfinite(x) and x <= 0 for x in c.token_logprobs)
        assert c.finish_reason in ("stop", "length")
        assert c.routed_experts is None
    assert completions[0].prompt_token_ids == PROMPT


async def test_a_call_may_override_the_sampling(generator):
    greedy = SamplingConfig(n=1, temperature=0.0, max_tokens=4)
    first, second = [
        await generator.generate.call_one([PROMPT], sampling_config=greedy) for _ in range(2)
    ]
    assert len(first) == 1
    assert len(first[0].token_ids) <= 4
    assert first[0].token_ids == second[0].token_ids


async def test_named_groups_sample_the_same_again_and_unnamed_ones_never_do(generator):
    prompts = [PROMPT, PROMPT]

    async def samples(**kwargs):
        return [c.token_ids for c in await generator.generate.call_one(prompts, **kwargs)]

    named = await samples(group_ids=["a", "b"])
    assert named == await samples(group_ids=["a", "b"])
    assert named[:3] == (await samples(group_ids=["a", "c"]))[:3]
    unnamed = await samples() + await samples()
    all_samples = [tuple(ids) for ids in named + unnamed]
    assert len(set(all_samples)) == len(all_samples)


async def test_concurrent_calls_share_the_engine_and_keep_apart(generator):
    calls = [
        generator.generate.call_one([[i] * 5], group_ids=[f"concurrent {i}"]) for i in range(12)
    ]
    for i, call in enumerate(calls):
        completions = await call
        assert [c.prompt_token_ids for c in completions] == [[i] * 5] * 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "prompt 1 is empty"),
        ([3, 999], "prompt 1 has token id 999; the model knows 0..271"),
        ([-1], "token id -1"),
        ([1] * 125, "prompt 1 has 125 tokens.*max_model_len = 128"),
    ],
)
async def test_a_bad_prompt_fails_its_call_and_nothing_else(generator, bad, message):
    good = generator.generate.call_one([PROMPT])
    with pytest.raises(ActorError, match=message):
        await generator.generate.call_one([PROMPT, bad])
    assert len(await good) == 3
    assert len(await generator.generate.call_one([PROMPT])) == 3


async def test_stop_strings_end_a_completion(generator):
    plain = (await generator.generate.call_one([PROMPT], group_ids=["s"]))[0]
    stop = next(c for c in plain.text if c.isascii() and c.isprintable())
    stopping = SamplingConfig(n=1, max_tokens=8, stop=[stop])
    cut = await generator.generate.call_one([PROMPT], sampling_config=stopping, group_ids=["s"])
    assert cut[0].finish_reason == "stop"
    assert cut[0].token_ids == plain.token_ids[: len(cut[0].token_ids)]
    assert stop in cut[0].text
    assert stop not in cut[0].text[:-1]


async def test_no_prompts_give_no_completions(generator):
    assert await generator.generate.call_one([]) == []


def test_seeds_differ_between_groups_samples_and_runs():
    seeds = {
        sample_seed(run, f"{step}/{prompt}", sample)
        for run in range(3)
        for step in range(20)
        for prompt in range(20)
        for sample in range(8)
    }
    assert len(seeds) == 3 * 20 * 20 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)
