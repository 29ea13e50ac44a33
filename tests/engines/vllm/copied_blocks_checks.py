"""Samples that copy the last block of their prompt against samples that each compute it; called
where vLLM may be imported."""

import asyncio
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

from torchtitan_rl.config import SamplingConfig
from torchtitan_rl.core.types import Completion
from torchtitan_rl.engines.vllm.cpu.copied_blocks import BlockCopier
from torchtitan_rl.engines.vllm.engine import Engine

BLOCK = 32
SEVERAL = SamplingConfig(n=6, max_tokens=5)
NOTHING_IS_COPIED = patch.object(BlockCopier, "get_num_new_matched_tokens", lambda *_: (0, False))


async def check_copied_blocks(engine: Engine) -> None:
    for length in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 24, 2 * BLOCK, 3 * BLOCK + 7):
        prompt = _prompt(length)
        # With one that begins alike, in the same call; their last blocks are not the same.
        prompts = [prompt, [*prompt[:-1], prompt[-1] + 1]]
        computed = await _check_same(engine, prompts, SEVERAL)
        rest = (length - 1) % BLOCK + 1
        shared = length - rest  # by both prompts, in whole blocks
        assert computed == shared + 2 * rest + 2 * (SEVERAL.n - 1), (length, computed)
    # More samples than run at once, which start as others end: the first of those that start in a
    # step computes the prompt's rest.
    many = engine._config.max_num_seqs + 8
    computed = await _check_same(engine, [_prompt(40)], SamplingConfig(n=many, max_tokens=5))
    assert computed in [BLOCK + steps * 8 + many - steps for steps in (2, 3, 4, 5)], computed
    await _check_resumed(engine)


async def _check_resumed(engine: Engine) -> None:
    """Requests that start again half-way, as when weights are swapped, share what they have by then
    if it is the same."""
    greedy = SamplingConfig(n=1, max_tokens=60, temperature=0.0)
    prompts, names = [_prompt(40)] * 4, ["a", "b", "c", "d"]
    straight = await engine.generate(prompts, greedy, names)
    with _counted(engine) as tokens:
        call = asyncio.create_task(engine.generate(prompts, greedy, names))
        while len(tokens) < 20:
            await asyncio.sleep(0.001)
        await engine._between_steps(
            lambda: engine._engine.reset_prefix_cache(reset_running_requests=True)
        )
        resumed = await call
    again = max(tokens[2:])
    assert 20 < again - 3 < len(prompts[0]) + 60, tokens  # one computed it, three the last token
    for one, other in zip(straight, resumed, strict=True):
        assert one.token_ids == other.token_ids
        assert max(map(_apart, one.token_logprobs, other.token_logprobs)) < 1e-4


def _apart(one: float, other: float) -> float:
    return abs(one - other)


async def _check_same(engine: Engine, prompts: list[list[int]], sampling: SamplingConfig) -> int:
    """To the bit. Returns how many tokens were computed for the prompts, where they are shared."""
    made, computed = [], []
    for shares in (False, True):
        await engine._between_steps(engine._engine.reset_prefix_cache)
        with _counted(engine) as tokens, nullcontext() if shares else NOTHING_IS_COPIED:
            names = [f"shared/{number}" for number in range(len(prompts))]
            made.append(await engine.generate(prompts, sampling, names))
        computed.append(sum(tokens))
    assert [_sampled(c) for c in made[0]] == [_sampled(c) for c in made[1]]
    assert len({tuple(c.token_ids) for c in made[1]}) > 1
    decoded = sum(len(c.token_ids) - 1 for c in made[1])
    return computed[1] - decoded


@contextmanager
def _counted(engine: Engine):
    """How many tokens each engine step computes."""
    scheduler = engine._engine.engine_core.engine_core.scheduler
    tokens: list[int] = []

    def schedule(*args, **kwargs):
        planned = type(scheduler).schedule(scheduler, *args, **kwargs)
        tokens.append(planned.total_num_scheduled_tokens)
        return planned

    with patch.object(scheduler, "schedule", schedule):
        yield tokens


def _prompt(length: int) -> list[int]:
    return [(7 * length + 3 * place) % 200 for place in range(length)]


def _sampled(completion: Completion) -> tuple:
    return completion.prompt_idx, completion.token_ids, completion.token_logprobs
