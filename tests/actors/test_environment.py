"""The environment as an actor: tools that do their work, and every way in which they may not."""

import asyncio
import os
import re
import signal

import pytest

from tests.tasks.tools.tricky_tools import Secret, Several, Tricky, ended, until
from torchtitan_rl.actors.environment import Environment
from torchtitan_rl.actors.interfaces import EnvironmentRequest, EnvironmentResponse
from torchtitan_rl.supervision.spawn import spawn_environment
from torchtitan_rl.tasks.tools.tool import ToolCall

MAX_CHARS = 2000
TIMEOUT = 2.0


@pytest.fixture(scope="module")
async def spawned():
    config = Environment.Config(
        timeout_seconds=TIMEOUT, concurrent_calls=8, max_result_chars=MAX_CHARS
    )
    spawned = await spawn_environment(config, Several.Config())
    yield spawned
    await spawned.stop()


@pytest.fixture(scope="module")
def respond(spawned):
    async def respond(*requests: EnvironmentRequest) -> list[EnvironmentResponse]:
        return await spawned.actor.respond.call_one(list(requests))

    return respond


def calls(*made: tuple, task="tricky", state=None, seconds=None) -> EnvironmentRequest:
    tool_calls = [ToolCall(*call) for call in made]
    return EnvironmentRequest(task, [], tool_calls, state or {}, seconds)


async def one(respond, *call) -> tuple[str, str]:
    """The outcome of a call and what the model is told of it."""
    [response] = await respond(calls(call))
    [outcome], [message] = response.outcomes, response.messages
    assert message["role"] == "tool"
    assert message.get("name") == call[0]
    assert not response.failure
    return outcome, message["content"]


@pytest.mark.parametrize(
    ("call", "outcome", "told"),
    [
        (("add", {"a": 1, "b": 2}), "ok", "3"),
        (("add", {"a": "41"}), "ok", "42"),
        (("add", {"a": 1}, "no closing brace"), "malformed", "error: no closing brace"),
        (("add", "a=1"), "malformed", "error: arguments of add must be an object"),
        (("add", {"b": 2}), "malformed", "error: wrong arguments of add: a: Field required"),
        (("fail", {"kind": "ArgumentsError", "message": "b?"}), "malformed", "error: b?"),
        (("ad", {}), "unknown", "error: there is no tool 'ad'; did you mean 'add'? Known: add,"),
        (("fail", {"message": "no\ud800"}), "raised", "error: fail raised ValueError: no?"),
        (("fail", {}), "raised", "error: fail raised ValueError"),
        (("fail", {"kind": "SystemExit"}), "raised", "error: fail raised SystemExit"),
        (("die", {"how": "exit"}), "raised", "error: die ended its process"),
        (("die", {"how": "segfault"}), "raised", "error: die ended its process"),
        (("add", {"a": Secret}), "malformed", "error: wrong arguments of add: a: Input should"),
        (("hide", {"what": "secret"}), "raised", "error: hide left a state that cannot be pickled"),
        (("hide", {"what": "large"}), "raised", "error: hide left a state of more than 64 MiB"),
        (("hide", {"what": "unreadable"}), "raised", "error: hide could not be called or answered"),
        (("wait", {"then": "raise"}), "raised", "error: wait raised ValueError: waited in vain"),
        (("wait", {"then": "exit"}), "raised", "error: wait raised SystemExit: bye"),
        (("wait", {"then": "cancel"}), "raised", "error: wait cancelled itself"),
        (("wait", {"then": "no"}), "malformed", "error: wrong arguments of wait: then: Input"),
    ],
)
async def test_outcomes(respond, call, outcome, told):
    got, content = await one(respond, *call)
    assert (got, content[: len(told)]) == (outcome, told)


@pytest.mark.parametrize("name", [7, None, "", "x" * 1_000_000, ["add"], "\ud800"])
async def test_a_name_that_is_none(respond, name):
    [response] = await respond(calls((name, {}), (name, {}, "garbled")))
    assert response.outcomes == ["unknown", "malformed"]
    assert [m.get("name") for m in response.messages] == ["?" if name == "\ud800" else None] * 2
    assert all(len(str(message).encode()) < 500 for message in response.messages)


async def test_errors_are_short(respond):
    _, content = await one(respond, "fail", {"message": "x" * 1_000_000})
    assert content.endswith("x… [999519 characters left out]")
    _, content = await one(respond, "add", {"x" * 1_000_000: 1})
    assert len(content) < 600
    _, content = await one(respond, "add", {}, "x" * 1_000_000)
    assert len(content) < 600


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("none", "null"),
        ("bytes", "café \ufffd"),
        ("surrogate", "a?b"),
        ("nested surrogate", '["?"]'),
        ("set", "{1}"),
        ("function", "<built-in function len>"),
        ("tuple keys", "{(1, 2): 3}"),
        ("nan", "NaN"),
        ("json", '{"é": [1, 2.5, null, true]}'),
        ("itself", "[[...]]"),
        ("empty", ""),
    ],
)
async def test_any_result_is_text(respond, what, text):
    assert await one(respond, "odd", {"what": what}) == ("ok", text)


async def test_a_hundred_megabytes_are_cut_in_the_worker(spawned, respond):
    [actor] = spawned.processes
    before = actor.memory_info().rss
    outcome, content = await one(respond, "large", {"megabytes": 100, "character": "é"})
    assert outcome == "ok"
    assert content == "é" * MAX_CHARS + f"… [{100 * 2**20 - MAX_CHARS} characters left out]"
    assert actor.memory_info().rss - before < 50 * 2**20


async def test_only_a_call_that_succeeds_changes_the_state(respond):
    state = {"calls": 5, "log": []}
    thens = ["", "raise", "hang", "exit", "?", ""]
    made = [("count", {"then": then}) for then in thens]
    [response] = await respond(calls(*made, ("wait", {"then": "raise"}), state=state))
    outcomes = ["ok", "raised", "timed_out", "raised", "malformed", "ok", "raised"]
    assert response.outcomes == outcomes
    assert response.state == {"calls": 7, "log": ["", ""]}
    assert [m["content"] for m in response.messages if m["content"][0] != "e"] == ["6", "7"]


async def test_what_cannot_be_pickled_is_told_to_the_model(respond):
    class Local:
        """Monarch can send it, pickle cannot."""

    [response, fine] = await respond(
        calls(("count", {}), state={"x": Local()}), calls(("count", {}))
    )
    assert response.outcomes == ["raised"]
    assert "could not be called" in response.messages[0]["content"]
    assert list(response.state) == ["x"]
    assert fine.outcomes == ["ok"]


async def test_an_async_tool_runs_in_the_actor_and_has_the_state(spawned, respond):
    [response] = await respond(calls(("wait", {}), ("count", {})))
    assert response.messages[0]["content"] == str(spawned.processes[0].pid)
    assert response.state == {"waited": True, "calls": 1, "log": [""]}


async def test_an_async_tool_that_does_not_end_or_heed_is_left(respond):
    [hung, deaf] = await respond(
        calls(("wait", {"then": "hang"})), calls(("wait", {"then": "deaf"}))
    )
    assert hung.outcomes == deaf.outcomes == ["timed_out"]
    assert hung.messages[0]["content"] == "error: wait gave no answer in 2 s"
    assert deaf.state == {}


async def test_a_hang_holds_up_nobody(respond):
    hows = ["sleep", "power", "regex"]  # the last two keep the GIL
    hanging = asyncio.ensure_future(respond(*[calls(("hang", {"how": how})) for how in hows]))
    await asyncio.sleep(0.1)
    [sibling] = await respond(calls(("add", {"a": 1}), ("wait", {})))
    assert sibling.outcomes == ["ok", "ok"]
    assert not hanging.done()
    for hung in await hanging:
        assert hung.outcomes == ["timed_out"]
        assert hung.messages[0]["content"] == "error: hang gave no answer in 2 s"
    assert await one(respond, "add", {"a": 1}) == ("ok", "2")


async def test_the_rollouts_time_bounds_all_its_calls(respond):
    hang, add = ("hang", {}), ("add", {"a": 1})
    none_left, some_left, enough = await respond(
        calls(add, seconds=0.0), calls(hang, add, seconds=0.3), calls(add, hang, seconds=60.0)
    )
    assert none_left.outcomes == ["timed_out"]
    assert some_left.outcomes == ["timed_out", "timed_out"]
    assert "the conversation may not last any longer" in some_left.messages[0]["content"]
    assert enough.outcomes == ["ok", "timed_out"]


async def test_a_mixed_crowd_is_answered_in_order(respond):
    kinds = [
        (("add", {"a": 1}), "ok"),
        (("count", {}), "ok"),
        (("fail", {}), "raised"),
        (("odd", {"what": "surrogate"}), "ok"),
        (("large", {"megabytes": 1}), "ok"),
        (("die", {"how": "exit"}), "raised"),
        (("nothing", {}), "unknown"),
        (("wait", {}), "ok"),
        (("add", {}), "malformed"),
        (("fail", {"message": "x" * 2**20}), "raised"),
    ]
    crowd = [kinds[i % len(kinds)] if i % 25 else (("hang", {}), "timed_out") for i in range(200)]
    marked = [calls(call, state={"number": i}) for i, (call, _) in enumerate(crowd)]
    responses = await respond(*marked)
    assert [r.outcomes for r in responses] == [[outcome] for _, outcome in crowd]
    assert [r.state["number"] for r in responses] == list(range(200))
    assert [m["name"] for r in responses for m in r.messages] == [call[0] for call, _ in crowd]


async def test_workers_are_forked_from_a_built_task_and_used_again(spawned, respond):
    responses = await respond(*[calls(("where", {})) for _ in range(50)])
    told = [eval(r.messages[0]["content"]) for r in responses]
    pids, built, numbers = (set(column) for column in zip(*told, strict=True))
    assert len(pids) <= 8  # concurrent_calls
    assert len(built) == 1
    assert not built & (pids | {spawned.processes[0].pid})
    assert len(numbers) == 50
    assert (
        len(spawned.processes[0].children(recursive=True)) <= 1 + 8
    )  # the fork server is one more


async def test_an_answer_that_fails_says_why(respond):
    failures = {
        "raise": "raised LookupError: nobody there",
        "hang": "gave no answer in 2 s",
        "exit": "ended its process",
        "text": "returned 'hello'; expected a list of messages",
        "no role": "returned {'content': 'hello'} as a message, whose role is none of user, "
        "system, tool; expected a list of messages",
        "no content": "returned {'role': 'user', 'content': None} as a message, whose content is "
        "no text; expected a list of messages",
    }
    responses = await respond(
        *[EnvironmentRequest("tricky", [{"content": said}], [], {"x": 1}) for said in failures]
    )
    raised = responses[0].failure
    assert re.fullmatch(r".*there \(/.*tricky_tools\.py:\d+\)", raised)  # the line that raised
    responses[0].failure = raised.partition(" (")[0]
    assert responses == [
        EnvironmentResponse([], {"x": 1}, [], f"answer of task 'tricky' {failure}")
        for failure in failures.values()
    ]


@pytest.mark.parametrize(
    ("call", "said", "clear"),
    [
        (("fail", {"kind": "SystemExit"}), r"raised SystemExit \(/.*tricky_tools\.py:\d+\)", True),
        (("fail", {}), r"raised ValueError \(/.*tricky_tools\.py:\d+\)", False),
        (("wait", {"then": "raise"}), r"raised ValueError: waited .*tricky_tools\.py:\d+\)", False),
        (("die", {"how": "exit"}), "ended its process", True),
        (("hide", {"what": "secret"}), "left a state that cannot be pickled.*", True),
        (("fail", {"kind": "ArgumentsError"}), None, None),
        (("fail", {"knid": "x"}), None, None),
        (("fial", {}), None, None),
    ],
)
async def test_a_failure_of_a_tool_is_told_from_one_of_the_model(respond, call, said, clear):
    request = EnvironmentRequest("tricky", [], [ToolCall(*call)], {})
    [failure] = (await respond(request))[0].tool_failures
    assert (failure is None) == (said is None)
    if failure:
        assert re.fullmatch(said, failure.said)
        assert failure.clear == clear


async def test_answers(respond):
    messages = [{"role": "assistant", "content": "hi"}]
    bye = [{"role": "assistant", "content": "bye"}]
    plain, hi, ended, waited, unknown = await respond(
        EnvironmentRequest("plain", messages, [], {"x": 1}),
        EnvironmentRequest("tricky", messages, [], {}),
        EnvironmentRequest("tricky", bye, [], {}),
        EnvironmentRequest("waiting", messages, [], {}),
        EnvironmentRequest("trickey", messages, [], {}),
    )
    assert plain == EnvironmentResponse([], {"x": 1}, [])
    assert hi == EnvironmentResponse([{"role": "user", "content": "hi? ?"}], {"answered": "hi"}, [])
    assert ended == EnvironmentResponse([], {"answered": "bye"}, [])
    assert waited.messages == [{"role": "user", "content": "waited"}]
    assert unknown.failure.startswith("no task 'trickey'; did you mean 'tricky'?")


async def test_a_task_without_tools_says_so(respond):
    [response] = await respond(calls(("add", {}), task="plain"))
    assert response.messages[0]["content"] == "error: there is no tool 'add'; Known: none"


async def test_nothing_outlives_a_killed_actor(tmp_path):
    spawned = await spawn_environment(Environment.Config(), Tricky.Config())
    pid_file = tmp_path / "pids"
    hanging = spawned.actor.respond.call_one(
        [calls(("child", {"pid_file": str(pid_file)})), calls(("hang", {"how": "power"}))]
    )
    await until(pid_file.exists)

    def children():
        return spawned.processes[0].children(recursive=True)

    # Those of the first call, and the one that hangs.
    pids = {int(pid) for pid in pid_file.read_text().split()}
    await until(lambda: {p.pid for p in children()} > pids)
    left = children()
    os.kill(spawned.processes[0].pid, signal.SIGKILL)
    await until(lambda: all(map(ended, left)))
    del hanging
    await spawned.stop()


@pytest.mark.parametrize("name", ["timeout_seconds", "concurrent_calls", "max_result_chars"])
def test_limits_are_positive(name):
    with pytest.raises(ValueError, match=f"environment.{name} must be positive"):
        Environment.Config(**{name: 0})
