"""Who is to blame for tool calls that fail, and when that ends a run."""

import pytest

from torchtitan_rl.actors.interfaces import EnvironmentRequest, EnvironmentResponse
from torchtitan_rl.config import SupervisionConfig
from torchtitan_rl.run.tool_guard import FEW_CALLS, BrokenToolError, ToolGuard
from torchtitan_rl.tasks.tools.tool import ToolCall, ToolFailure

BROKEN = ToolFailure("raised ConnectionError: refused (/mine.py:31)")
REFUSED = ToolFailure("raised KeyError: 'Rome' (/mine.py:12)", clear=False)


def guard(calls=64, steps=3):
    return ToolGuard(SupervisionConfig(most_failed_tool_calls=calls, most_untrainable_steps=steps))


def note(guard, *outcomes, count=1, name="lookup"):
    """Note calls with these outcomes; a ToolFailure stands for a call that it is the outcome of."""
    for outcome in outcomes * count:
        failure = outcome if isinstance(outcome, ToolFailure) else None
        call = ToolCall(name, {"city": "Rome"})
        response = EnvironmentResponse(
            [{"role": "tool", "content": f"error: {outcome}"}],
            {},
            ["raised" if failure else outcome],
            tool_failures=[failure],
        )
        guard.note([EnvironmentRequest("geo", [], [call], {})], [response])


def test_a_tool_that_always_fails_ends_the_run_and_is_to_blame():
    tools = guard(calls=8)
    note(tools, BROKEN, count=7)
    tools.check_step()
    note(tools, BROKEN)
    with pytest.raises(BrokenToolError) as error:
        tools.check()
    assert str(error.value).startswith(
        "tool 'lookup' of task 'geo' failed in 8 calls in a row: raised ConnectionError: refused "
        '(/mine.py:31), called with {"city": "Rome"}. The tool is to blame, and not the model'
    )


def test_one_call_that_works_is_enough_to_go_on():
    tools = guard(calls=8)
    for _ in range(5):
        note(tools, *[BROKEN] * 7, "ok")
        tools.check_step()
    note(tools, BROKEN, count=7)
    note(tools, "ok", name="other")  # another tool's success is none of this one's
    note(tools, BROKEN)
    with pytest.raises(BrokenToolError, match="tool 'lookup'"):
        tools.check_step()


def test_arguments_that_are_never_taken_end_it_later_and_either_may_be_to_blame(capsys):
    tools = guard(calls=8, steps=3)
    for _ in range(2):
        note(tools, REFUSED, count=50)
        tools.check_step()
        note(tools, REFUSED, count=50)
        tools.check()  # an evaluation is no step
    said = capsys.readouterr().out
    assert said.count("warning: tool 'lookup' of task 'geo' failed in each of 50 calls: ") == 1
    assert "KeyError: 'Rome' (/mine.py:12)" in said
    assert "Either the tool has a bug, or the model never gives it" in said
    note(tools, "ok")
    note(tools, REFUSED, count=50)
    tools.check_step()
    for _ in range(2):
        note(tools, REFUSED)
        tools.check_step()
    note(tools, REFUSED)
    with pytest.raises(BrokenToolError, match="failed for 3 steps in a row: raised KeyError"):
        tools.check_step()


@pytest.mark.parametrize("outcome", ["malformed", "unknown"])
def test_calls_that_the_model_gets_wrong_end_nothing_and_are_its_own_fault(outcome, capsys):
    tools = guard(calls=8, steps=3)
    for _ in range(10):
        note(tools, outcome, count=FEW_CALLS)
        tools.check_step()
    said = capsys.readouterr().out
    assert said.count("warning") == 1
    assert f"task 'geo': the model got each of {FEW_CALLS} tool calls wrong" in said
    assert f"so no tool is to blame; the model was shown: error: {outcome}" in said
    note(tools, "ok")
    tools.check_step()
    note(tools, outcome, count=FEW_CALLS)
    tools.check_step()
    assert "warning" in capsys.readouterr().out


def test_a_few_failures_of_a_tool_are_told_once(capsys):
    tools = guard()
    for _ in range(3):
        note(tools, BROKEN, *["ok"] * 9)
        tools.check_step()
    said = capsys.readouterr().out
    assert said.count("warning") == 1
    assert "failed in 1 of 10 calls: raised ConnectionError" in said
    note(tools, REFUSED, *["ok"] * 9, name="other")
    tools.check_step()
    assert not capsys.readouterr().out


def test_a_conversation_without_time_blames_nobody():
    tools = guard(calls=2)
    note(tools, "timed_out", count=99)
    tools.check_step()


def test_a_model_that_is_only_learning_to_call_tools_gets_no_warning(capsys):
    tools = guard()
    tools.warns_of_model = False
    note(tools, "malformed", count=FEW_CALLS)
    tools.check()
    assert capsys.readouterr().out == ""
