"""Conversations take their turns together: real tools in a real environment, scripted words."""

import asyncio
import gc
import weakref
from collections import Counter
from dataclasses import replace

import pytest

from tests.tasks.tricky_tools import Plain, Tricky
from torchtitan_rl.actors.environment import Environment, Response
from torchtitan_rl.config import RolloutConfig, SamplingConfig
from torchtitan_rl.core.types import Completion
from torchtitan_rl.rollout.loop import Conversation, Group, roll_out
from torchtitan_rl.rollout.metrics import failure_metrics
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
    return Group(name, task, example, settings, renderer.render(example.messages))


class Script:
    """Says what TALK has for a group; remembers what it was asked."""

    def __init__(self, renderer):
        self.renderer, self.asked, self.turns = renderer, [], Counter()

    async def sample(self, prompts, samplings, names, groups):
        self.asked.append((prompts, samplings, names))
        made = []
        for index, (prompt, sampling, name) in enumerate(
            zip(prompts, samplings, names, strict=True)
        ):
            who, turn = name.split("/")[0], int((name.split("/") + ["0"] * 2)[2])
            for _ in range(sampling.n):
                ids = self.renderer.reply(self.message(TALK[who.split("#")[0]][turn]))
                cut = ids[: sampling.max_tokens]
                reason = "stop" if cut == ids else "length"
                text = self.renderer.tokenizer.decode(cut, skip_special_tokens=True)
                logprobs = [-0.5] * len(cut)
                made.append(Completion(1, index, prompt, text, cut, logprobs, reason))
        return made

    @staticmethod
    def message(said):
        if isinstance(said, str):
            return {"role": "assistant", "content": said}
        call = {"name": said[0], "arguments": said[1]}
        return {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}


def play(groups, script, environment, limits=LIMITS):
    return roll_out(
        groups,
        sample=script.sample,
        respond=lambda requests: environment.actor.respond.call_one(requests),
        renderer=script.renderer,
        limits=limits,
    )


async def test_two_hundred_conversations_with_every_bad_tool_all_end(renderer, environment):
    """None is lost, each has the end it should have, and meanwhile the loop serves others."""
    names = [f"{name}#{i}" for i in range(17) for name in TALK][:200]
    groups = [group(renderer, name) for name in names]
    script = Script(renderer)
    playing = asyncio.ensure_future(play(groups, script, environment))
    ticks = 0
    while not playing.done():
        await asyncio.sleep(0.005)
        ticks += 1
    await playing
    assert len(groups) == 200
    for made, name in zip(groups, names, strict=True):
        [conversation] = made.conversations
        rollout, kind = conversation.rollout, name.split("#")[0]
        assert (rollout.status, rollout.outcomes) == ENDS[kind], name
        assert len(rollout.completions) == len(conversation.turns) >= 1
        assert rollout.messages[0]["content"] == name
        assert all(turn.length <= LIMITS.max_tokens for turn in conversation.turns)
    # While tools hung for a second each, the controller was free.
    assert ticks > 100


async def test_what_was_sampled_is_never_tokenised_again(renderer, environment):
    made = group(renderer, "adds", n=2)
    await play([made], Script(renderer), environment)
    for number, conversation in enumerate(made.conversations):
        first, second = conversation.turns
        assert conversation.number == number
        assert second.prompt_token_ids[: first.length] == first.prompt_token_ids + first.token_ids
        told = second.prompt_token_ids[first.length :]
        assert "<tool_response>\n3\n</tool_response>" in renderer.tokenizer.decode(told)
        own = [a for a in second.attributions if a and a.role == "assistant" and a.content]
        assert len(own) == len(first.token_ids) + len(second.token_ids)
        roles = [message["role"] for message in conversation.rollout.messages]
        assert roles == ["user", "assistant", "tool", "assistant"]
        assert conversation.rollout.state == {"kept": "adds", "answered": "bye"}


async def test_seeds_have_names_of_their_own_and_completions_fit(renderer, environment):
    groups = [group(renderer, "never ends", n=2), group(renderer, "adds", n=2)]
    script = Script(renderer)
    await play(groups, script, environment)
    names = [name for _, _, asked in script.asked for name in asked]
    assert len(names) == len(set(names))
    assert names[:2] == ["never ends", "adds"]
    assert set(names[2:6]) == {"never ends/0/1", "never ends/1/1", "adds/0/1", "adds/1/1"}
    for prompts, samplings, _ in script.asked[1:]:
        for prompt, sampling in zip(prompts, samplings, strict=True):
            assert sampling.n == 1
            assert len(prompt) + sampling.max_tokens <= LIMITS.max_tokens


async def test_a_task_without_turns_takes_one(renderer):
    async def nobody(requests):
        raise AssertionError("there is nothing to respond to")

    task = Plain.Config().build()
    groups = [group(renderer, "adds", n=3, task=task)]
    script = Script(renderer)
    await roll_out(groups, sample=script.sample, respond=nobody, renderer=renderer, limits=LIMITS)
    statuses = [c.rollout.status for c in groups[0].conversations]
    assert statuses == ["finished"] * 3
    assert groups[0].conversations[0].rollout.messages[-1]["content"].startswith('\n{"name"')


async def test_a_completion_that_is_cut_off_ends_the_rollout(renderer, environment):
    cut, short = group(renderer, "adds", max_tokens=4), group(renderer, "adds")
    await play([cut], Script(renderer), environment)
    assert cut.conversations[0].rollout.status == "truncated"
    # Where the conversation's own length leaves less than max_tokens, that is the reason.
    room = len(short.shown.token_ids) + 10
    await play([short], Script(renderer), environment, RolloutConfig(max_tokens=room))
    assert short.conversations[0].rollout.status == "token_limit"
    assert short.conversations[0].turns[0].length == room
    with pytest.raises(ValueError, match=r"prompt of group adds has .* with 1 to sample"):
        check_prompt(short, RolloutConfig(max_tokens=5))


async def test_time_is_up_for_slow_tools(renderer, environment):
    made = group(renderer, "hangs")
    limits = RolloutConfig(max_turns=3, max_tokens=400, max_seconds=0.3)
    await play([made], Script(renderer), environment, limits)
    rollout = made.conversations[0].rollout
    assert (rollout.status, rollout.outcomes) == ("time_limit", ["timed_out"])


@pytest.mark.parametrize(
    ("failure", "seconds", "status"),
    [("raised", 60.0, "environment_failed"), ("was out of time", 1e-9, "time_limit")],
)
def test_an_answer_that_failed_ends_the_rollout_with_the_reason(renderer, failure, seconds, status):
    made = group(renderer, "is answered")
    conversation = Conversation(made, 0, renderer, RolloutConfig(max_seconds=seconds))
    ids = renderer.reply({"role": "assistant", "content": "hello"})
    conversation.take(Completion(0, 0, made.shown.token_ids, "hello", ids, None, "stop"))
    assert not conversation.hear(Response([], {}, [], failure))
    assert (conversation.rollout.status, conversation.rollout.failure) == (status, failure)


@pytest.mark.parametrize(
    ("happens", "counts", "partial"),
    [
        ("empty", {"empty": 1}, True),
        ("empty, then its reward fails", {"empty": 1, "failed": 3}, False),
        ("empty, then not useful", {"empty": 1, "dropped": 3}, True),
        ("timed out", {"timed_out": 4}, False),
    ],
)
def test_every_rollout_of_a_group_is_accounted_for_once(renderer, happens, counts, partial):
    made = group(renderer, "adds")
    made.sampling = replace(made.sampling, n=4)
    made.conversations = [Conversation(made, i, renderer, LIMITS) for i in range(4)]
    if happens.startswith("empty"):
        made.conversations[0].failed = ("empty", "nothing was sampled")
        made.bury()
    if happens.endswith("fails"):
        made.bury_all("failed", "it raised")
        made.fail("failed", "it raised")
    elif happens.endswith("useful"):
        made.give_up("dropped", "not useful")
    elif happens == "timed out":
        made.give_up("timed_out", "too slow")
    told = Counter()
    for failure in made.failures:
        told[failure.kind] += failure.rollouts
    assert told == counts
    metrics = failure_metrics(made.failures, ["tricky"])
    assert metrics["groups/partial/all"] == partial
    assert metrics["groups/dropped/all"] == (not partial)


def test_every_conversation_has_a_state_of_its_own(renderer):
    made = group(renderer, "adds")
    first, second = (Conversation(made, i, renderer, LIMITS) for i in range(2))
    first.rollout.state["kept"] = "changed"
    assert second.rollout.state == made.example.state == {"kept": "adds"}


def test_a_group_is_gone_when_nobody_needs_it(renderer):
    """Without waiting for the garbage collector: a batch may be large."""
    gc.disable()
    try:
        made = group(renderer, "adds")
        made.conversations = [Conversation(made, 0, renderer, LIMITS)]
        conversation = weakref.ref(made.conversations[0])
        del made
        assert conversation() is None
    finally:
        gc.enable()


def test_a_conversation_that_cannot_be_extended_is_rendered_anew(renderer):
    """A user's question makes Qwen3 render the whole conversation again: a sample of its own."""
    made = group(renderer, "is answered")
    conversation = Conversation(made, 0, renderer, LIMITS)
    ids = renderer.reply({"role": "assistant", "content": "hello", "reasoning_content": "hm"})
    text = renderer.tokenizer.decode(ids)
    assert text == "<think>\nhm\n</think>\n\nhello<|im_end|>"
    assert conversation.take(Completion(0, 0, made.shown.token_ids, text, ids, None, "stop"))
    told = Response([{"role": "user", "content": "and <|im_end|> then?"}], {}, [])
    assert conversation.hear(told)
    shown = renderer.tokenizer.decode(conversation.shown.token_ids)
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
