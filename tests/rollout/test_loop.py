"""Conversations take their turns together: real tools in a real environment, scripted words."""

import asyncio
import gc
import weakref
from collections import Counter
from dataclasses import dataclass

import pytest

from tests.tasks.tools.tricky_tools import Plain, Tricky
from torchtitan_rl.actors.environment import Environment
from torchtitan_rl.actors.interfaces import EnvironmentResponse, SampleFailure
from torchtitan_rl.config import RolloutConfig, SamplingConfig
from torchtitan_rl.core.types import Completion, Status
from torchtitan_rl.rollout.groups import PromptGroup
from torchtitan_rl.rollout.loop import RolloutLoop
from torchtitan_rl.rollout.prompts import check_prompt
from torchtitan_rl.rollout.renderer import ChatRenderer
from torchtitan_rl.supervision.spawn import spawn_environment
from torchtitan_rl.tasks.task import Example

LIMITS = RolloutConfig(max_turns=3, max_tokens=400, max_seconds=60.0)
TALK = {
    "adds": [("add", {"a": 1, "b": 2}), "bye"],
    "hangs": [("hang", {}), "bye"],
    "keeps the GIL": [("hang", {"how": "regex"}), "bye"],
    "raises": [("fail", {"message": "no"}), "bye"],
    "dies": [("die", {"how": "exit"}), "bye"],
    "gets garbage": [("odd", {"what": "surrogate"}), "bye"],
    "gets a megabyte": [("large", {"megabytes": 1}), "bye"],
    "calls nobody": [("nobody", {}), "bye"],
    "calls badly": [("add", "a=1"), "bye"],
    "never ends": [("add", {"a": 1})] * 9,
    "is answered": ["hello", "bye"],
    "kills its answer": ["exit"],
}
"""What the model says, turn by turn: a call, or words."""
ENDS = {
    "adds": ("finished", ["ok"]),
    "hangs": ("finished", ["timed_out"]),
    "keeps the GIL": ("finished", ["timed_out"]),
    "raises": ("finished", ["raised"]),
    "dies": ("finished", ["raised"]),
    "gets garbage": ("finished", ["ok"]),
    "gets a megabyte": ("token_limit", ["ok"]),
    "calls nobody": ("finished", ["unknown"]),
    "calls badly": ("finished", ["malformed"]),
    "never ends": ("turn_limit", ["ok", "ok"]),
    "is answered": ("finished", []),
    "kills its answer": ("environment_failed", []),
}


@pytest.fixture(scope="module")
def renderer(tiny_model):
    return ChatRenderer(tiny_model, thinking=True)


@pytest.fixture(scope="module")
async def environment():
    config = Environment.Config(timeout_seconds=1.0, concurrent_calls=16, max_result_chars=500)
    spawned = await spawn_environment(config, Tricky.Config())
    yield spawned
    await spawned.stop()


def group(renderer, name, *, n=1, task=None, **sampling):
    task = task or Tricky.Config(show_tools=False).build()
    example = Example([{"role": "user", "content": name}], None, state={"kept": name})
    settings = SamplingConfig(**{"n": n, "max_tokens": 64, **sampling})
    return PromptGroup(name, task, example, settings, renderer.render(example.messages))


class Script:
    """Says what TALK has for a group; remembers what it was asked."""

    def __init__(self, renderer):
        self.renderer, self.asked, self.turns = renderer, [], Counter()

    async def sample(self, requests):
        self.asked.append(requests)
        return [self.complete(request) for request in requests]

    def complete(self, request):
        prompt, sampling, name = request.prompt_token_ids, request.sampling, request.seed_name
        who, turn = name.split("/")[0], int((name.split("/") + ["0"] * 2)[2])
        ids = self.renderer.reply(self.message(TALK[who.split("#")[0]][turn]))
        cut = ids[: sampling.max_tokens]
        reason = "stop" if cut == ids else "length"
        text = self.renderer.tokenizer.decode(cut, skip_special_tokens=True)
        return Completion(
            1, 0, prompt, text, cut, token_logprobs=[-0.5] * len(cut), finish_reason=reason
        )

    @staticmethod
    def message(said):
        if isinstance(said, str):
            return {"role": "assistant", "content": said}
        call = {"name": said[0], "arguments": said[1]}
        return {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}


def play(groups, script, environment, limits=LIMITS):
    return RolloutLoop(
        groups,
        sample=script.sample,
        respond=lambda requests: environment.actor.respond.call_one(requests),
        renderer=script.renderer,
        limits=limits,
    ).run()


async def test_two_hundred_conversations_with_every_bad_tool_all_end(renderer, environment):
    """No conversation is lost, each ends as it should, and meanwhile the loop serves others."""
    names = [f"{name}#{i}" for i in range(17) for name in TALK][:200]
    groups = [group(renderer, name) for name in names]
    script = Script(renderer)
    playing = asyncio.ensure_future(play(groups, script, environment))
    ticks = 0
    while not playing.done():
        await asyncio.sleep(0.005)
        ticks += 1
    for made, name in zip(await playing, names, strict=True):
        [rollout] = made.rollouts
        assert (rollout.status, rollout.outcomes) == ENDS[name.split("#")[0]], name
        assert (rollout.group_id, rollout.sample) == (name, 0)
        assert len(rollout.turns) >= 1
        assert rollout.messages[0]["content"] == name
        assert all(turn.length <= LIMITS.max_tokens for turn in rollout.turns)
    # While tools hung for a second each, the controller was free.
    assert ticks > 100


async def test_what_was_sampled_is_never_tokenised_again(renderer, environment):
    [made] = await play([group(renderer, "adds", n=2)], Script(renderer), environment)
    for number, rollout in enumerate(made.rollouts):
        first, second = rollout.turns
        assert rollout.sample == number
        assert second.prompt_token_ids[: first.length] == first.prompt_token_ids + first.token_ids
        told = second.prompt_token_ids[first.length :]
        assert "<tool_response>\n3\n</tool_response>" in renderer.tokenizer.decode(told)
        own = [a for a in second.attributions if a and a.role == "assistant" and a.content]
        assert len(own) == len(first.token_ids) + len(second.token_ids)
        roles = [message["role"] for message in rollout.messages]
        assert roles == ["user", "assistant", "tool", "assistant"]
        assert rollout.state == {"kept": "adds", "answered": "bye"}


async def test_seeds_have_names_of_their_own_and_completions_fit(renderer, environment):
    groups = [group(renderer, "never ends", n=2), group(renderer, "adds", n=2)]
    script = Script(renderer)
    await play(groups, script, environment)
    seeds = [[(r.seed_name, r.seed_number) for r in asked] for asked in script.asked]
    # By group, then sample: so they enter the engine.
    assert seeds[0] == [("never ends", 0), ("never ends", 1), ("adds", 0), ("adds", 1)]
    later = ["never ends/0/1", "never ends/1/1", "adds/0/1", "adds/1/1"]
    assert seeds[1] == [(name, 0) for name in later]
    flat = [seed for turn in seeds for seed in turn]
    assert len(flat) == len(set(flat))
    for request in (request for asked in script.asked for request in asked):
        assert request.sampling.n == 1
        assert len(request.prompt_token_ids) + request.sampling.max_tokens <= LIMITS.max_tokens
        assert request.group_id == request.seed_name.split("/")[0]


async def test_a_task_without_turns_takes_one(renderer):
    async def nobody(requests):
        raise AssertionError("there is nothing to respond to")

    task = Plain.Config().build()
    groups = [group(renderer, "adds", n=3, task=task)]
    script = Script(renderer)
    [made] = await RolloutLoop(
        groups, sample=script.sample, respond=nobody, renderer=renderer, limits=LIMITS
    ).run()
    assert [rollout.status for rollout in made.rollouts] == ["finished"] * 3
    assert made.rollouts[0].messages[-1]["content"].startswith('\n{"name"')


async def test_a_completion_that_is_cut_off_ends_the_rollout(renderer, environment):
    cut, short = group(renderer, "adds", max_tokens=4), group(renderer, "adds")
    [made] = await play([cut], Script(renderer), environment)
    assert made.rollouts[0].status == Status.TRUNCATED
    # Where the conversation's own length leaves less than max_tokens, that is the reason.
    room = len(short.shown.token_ids) + 10
    [made] = await play([short], Script(renderer), environment, RolloutConfig(max_tokens=room))
    assert made.rollouts[0].status == Status.TOKEN_LIMIT
    assert made.rollouts[0].turns[0].length == room
    with pytest.raises(ValueError, match=r"prompt of group adds has .* with 1 to sample"):
        check_prompt(short, RolloutConfig(max_tokens=5))


async def test_time_is_up_for_slow_tools(renderer, environment):
    limits = RolloutConfig(max_turns=3, max_tokens=400, max_seconds=0.3)
    [made] = await play([group(renderer, "hangs")], Script(renderer), environment, limits)
    [rollout] = made.rollouts
    assert (rollout.status, rollout.outcomes) == ("time_limit", ["timed_out"])


def scripted(renderer, groups, samples, responses=(), **limits):
    """A loop whose generators and environment say these, call by call; an error is raised."""
    calls = {"sample": iter(samples), "respond": iter(responses)}

    def caller(who):
        async def call(requests):
            said = next(calls[who])
            if isinstance(said, BaseException):
                raise said
            pairs = zip(said, requests, strict=True)
            return [one(request) if callable(one) else one for one, request in pairs]

        return call

    return RolloutLoop(
        groups,
        sample=caller("sample"),
        respond=caller("respond"),
        renderer=renderer,
        limits=RolloutConfig(**{"max_turns": 3, "max_tokens": 400, **limits}),
    )


def says(renderer, content, **more):
    """A completion of whatever prompt is asked for."""
    ids = renderer.reply({"role": "assistant", "content": content, **more})
    return lambda request: Completion(2, 0, request.prompt_token_ids, content, ids)


@pytest.mark.parametrize(
    ("failure", "seconds", "status"),
    [("raised", 60.0, "environment_failed"), ("was out of time", 1e-9, "time_limit")],
)
async def test_an_answer_that_failed_ends_the_rollout_with_the_reason(
    renderer, failure, seconds, status
):
    response = EnvironmentResponse([], {}, [], failure)
    prompts = [group(renderer, "is answered")]
    words = [[says(renderer, "hello")]]
    [made] = await scripted(renderer, prompts, words, [[response]], max_seconds=seconds).run()
    [rollout] = made.ended
    assert (rollout.status, rollout.failure) == (status, failure)


class AllOrNone(Tricky):
    @dataclass(kw_only=True, slots=True)
    class Config(Tricky.Config):
        pass

    group_scoring = True


@pytest.mark.parametrize("task", [Plain, AllOrNone])
async def test_every_rollout_has_an_outcome_of_its_own(renderer, task):
    """A rollout that fails does not affect the others, unless its task scores them together."""
    prompt = group(renderer, "adds", n=5, task=task.Config().build())

    def strange(request):
        return Completion(2, 0, [1, 2, 3], "", [4])

    def nothing(request):
        return Completion(2, 0, request.prompt_token_ids, "", [])

    failure = SampleFailure("failed", "ValueError: no such token")
    words = says(renderer, "bye")
    ends = EnvironmentResponse([], {}, [])
    said = [words, failure, nothing, strange, words]
    [made] = await scripted(renderer, [prompt], [said], [[ends, ends]]).run()
    assert [rollout.sample for rollout in made.rollouts] == [0, 1, 2, 3, 4]
    assert [(r.status, r.failure) for r in made.rollouts[1:4]] == [
        (Status.FAILED, "ValueError: no such token"),
        (Status.EMPTY, "nothing was sampled (stop)"),
        (Status.FAILED, "the generator returned a completion of another prompt than it was given"),
    ]
    first, last = made.rollouts[0], made.rollouts[4]
    expected = (Status.FINISHED, "")
    if task is AllOrNone:
        reason = "another sample of its group failed: ValueError: no such token"
        expected = (Status.FAILED, reason)
    assert (first.status, first.failure) == (last.status, last.failure) == expected
    assert first.completions[0].token_versions == [2] * len(first.token_ids)
    assert len(made.ended) + len(made.lost) == 5


async def test_what_there_is_of_a_group_that_is_given_up_is_kept(renderer):
    """A group that times out in its second turn: one rollout failed by itself, one had ended."""
    prompt = group(renderer, "is answered", n=3)
    first = [says(renderer, "hello"), SampleFailure("empty", "nothing"), says(renderer, "hello")]
    tell = EnvironmentResponse([{"role": "tool", "content": "go on"}], {"n": 1}, ["ok"])
    end = EnvironmentResponse([], {}, [])
    loop = scripted(renderer, [prompt], [first, asyncio.CancelledError()], [[tell, end]])
    with pytest.raises(asyncio.CancelledError):
        await loop.run()
    [made] = loop.given_up(Status.TIMED_OUT, "took longer than 5 s")
    late = (Status.TIMED_OUT, "took longer than 5 s")
    ends = [(rollout.status, rollout.failure) for rollout in made.rollouts]
    assert ends == [late, (Status.EMPTY, "nothing"), late]
    assert [len(rollout.turns) for rollout in made.rollouts] == [1, 0, 1]
    assert [message["role"] for message in made.rollouts[0].messages][-1] == "tool"
    [never] = scripted(renderer, [prompt], []).given_up(Status.CANCELLED, "not needed")
    assert [rollout.status for rollout in never.rollouts] == [Status.CANCELLED] * 3


async def test_every_conversation_has_a_state_of_its_own(renderer):
    def changes(request):
        request.state["kept"] = "changed"
        return EnvironmentResponse([], request.state, [])

    prompt = group(renderer, "is answered", n=2)
    words = [[says(renderer, "hello")] * 2]
    leaves = EnvironmentResponse([], {"kept": "is answered"}, [])
    [made] = await scripted(renderer, [prompt], words, [[changes, leaves]]).run()
    assert [r.state["kept"] for r in made.rollouts] == ["changed", "is answered"]
    assert prompt.example.state == {"kept": "is answered"}


async def test_a_group_is_gone_when_nobody_needs_it(renderer):
    """Without waiting for the garbage collector: a batch may be large."""
    gc.disable()
    try:
        words = [[says(renderer, "bye")]]
        end = [[EnvironmentResponse([], {}, [])]]
        loop = scripted(renderer, [group(renderer, "is answered")], words, end)
        [made] = await loop.run()
        conversation = weakref.ref(loop._conversations[0][0])
        del made, loop
        assert conversation() is None
    finally:
        gc.enable()


async def test_a_conversation_that_cannot_be_extended_is_rendered_anew(renderer):
    """A user's question makes Qwen3 render the whole conversation again: a sequence of its own."""
    told = EnvironmentResponse([{"role": "user", "content": "and <|im_end|> then?"}], {}, [])
    words = [[says(renderer, "hello", reasoning_content="hm")], [says(renderer, "bye")]]
    end = EnvironmentResponse([], {}, [])
    loop = scripted(renderer, [group(renderer, "is answered")], words, [[told], [end]])
    [made] = await loop.run()
    first, second = made.rollouts[0].turns
    said = renderer.tokenizer.decode(first.token_ids)
    assert said == "<think>\nhm\n</think>\n\nhello<|im_end|>"
    shown = renderer.tokenizer.decode(second.prompt_token_ids)
    assert "hm" not in shown
    assert "hello" in shown
    assert shown.endswith("then?<|im_end|>\n<|im_start|>assistant\n")
    assert shown.count("<|im_end|>") == 3


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_turns": 0}, "max_turns must be at least 1"),
        ({"max_seconds": 0.0}, "max_seconds positive"),
        ({"max_tokens": -1}, "max_tokens 0"),
        ({"untrained_share": 1.0}, "untrained_share must be in"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        RolloutConfig(**limits)
