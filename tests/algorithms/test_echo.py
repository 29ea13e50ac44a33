"""Echo: which tokens, with what weight, and what gradient; RL beside it is left alone."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.algorithms.echo import Attribution, check_filter, checked_mask, echo_alphas
from torchtitan_rl.algorithms.echo_loss import echo_loss
from torchtitan_rl.algorithms.objective import objective
from torchtitan_rl.algorithms.policy_loss import LOSSES, LossInputs
from torchtitan_rl.config import EchoConfig, LossConfig, RoleEcho, ToolEcho
from torchtitan_rl.config.echo import ROLES
from torchtitan_rl.core.metrics import flatten


def said(role, *, name=None, shown=False):
    """A token of a message; the assistant's are sampled, unless they were only shown."""
    sampled = role == "assistant" and not shown
    return Attribution(role, content=True, tool_name=name, sampled=sampled)


def scaffold(role):
    return Attribution(role, content=False)


CALCULATOR, SEARCH, NAMELESS = (said("tool", name=name) for name in ("calculator", "search", None))


@pytest.mark.parametrize(
    ("config", "tokens", "alphas"),
    [
        (EchoConfig(tool=ToolEcho()), [said("user"), CALCULATOR, SEARCH], [None, 1.0, 1.0]),
        (EchoConfig(tool=ToolEcho()), [said("user"), NAMELESS], [None, 1.0]),
        (
            EchoConfig(tool=ToolEcho(alpha=0.5, tool_names=("search",))),
            [said("user"), CALCULATOR, SEARCH, NAMELESS],
            [None, None, 0.5, None],
        ),
        (EchoConfig(user=RoleEcho(alpha=2)), [said("system"), said("user")], [None, 2]),
        (EchoConfig(system=RoleEcho()), [said("system"), said("system")], [None, 1.0]),
        (EchoConfig(assistant=RoleEcho(alpha=-1)), [None, said("assistant")], [None, -1]),
        (
            EchoConfig(user=RoleEcho(alpha=0), tool=ToolEcho(alpha=3)),
            [None, said("user"), said("tool"), said("assistant")],
            [None, 0, 3, None],
        ),
        # In a later turn, what the model is shown of itself is history.
        (
            EchoConfig(assistant=RoleEcho()),
            [None, said("assistant", shown=True), said("assistant")],
            [None, None, 1.0],
        ),
        # Scaffolding and tokens of unknown origin never echo.
        (EchoConfig(tool=ToolEcho()), [None, scaffold("tool"), None, CALCULATOR], [None] * 3 + [1]),
        (EchoConfig(tool=ToolEcho()), [], []),
    ],
)
def test_weights_by_table(config, tokens, alphas):
    assert echo_alphas(config, tokens) == alphas


def test_what_the_first_prompt_shows_of_the_assistant_is_a_demonstration():
    tokens = [None, said("assistant", shown=True), scaffold("assistant"), said("assistant")]
    config = EchoConfig(assistant=RoleEcho())
    assert echo_alphas(config, tokens, first_turn=True) == [None, 1.0, None, 1.0]
    others = EchoConfig(user=RoleEcho())
    assert echo_alphas(others, tokens, first_turn=True) == [None] * 4


@pytest.mark.parametrize("role", ROLES)
def test_a_role_echoes_and_the_others_do_not(role):
    config = EchoConfig(**{role: (ToolEcho if role == "tool" else RoleEcho)(alpha=0.25)})
    tokens = [None, *(said(r) for r in ROLES), *(scaffold(r) for r in ROLES)]
    assert (
        echo_alphas(config, tokens)
        == [None, *(0.25 if r == role else None for r in ROLES)] + [None] * 4
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ROLES), st.booleans(), st.booleans())))
def test_a_filter_can_only_narrow_and_token_0_never_echoes(tokens):
    config = EchoConfig(user=RoleEcho(), tool=ToolEcho(alpha=2))
    attributions = [Attribution(role, content) for role, content, _ in tokens]
    allowed = [keep for *_, keep in tokens]
    whole, narrowed = echo_alphas(config, attributions), echo_alphas(config, attributions, allowed)
    assert narrowed == [a if keep else None for a, keep in zip(whole, allowed, strict=True)]
    assert not whole or whole[0] is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EchoConfig(), "at least one of system, user, assistant, tool"),
        (lambda: RoleEcho(alpha=math.inf), "alpha must be a finite number; got inf"),
        (lambda: ToolEcho(alpha=math.nan), "alpha must be a finite number; got nan"),
        (lambda: ToolEcho(tool_names=()), "must name at least one tool"),
        (lambda: ToolEcho(tool_names="search"), "must name at least one tool.*got 'search'"),
        (lambda: EchoConfig(user=RoleEcho(), filter="mine"), "unknown echo filter 'mine'"),
        (
            lambda: check_filter(
                EchoConfig(user=RoleEcho(), filter="shutil:which", filter_kwargs={"x": 1})
            ),
            "echo filter 'shutil:which' cannot take kwargs.*it takes mode, path",
        ),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_filters_masks_are_taken_as_they_are():
    assert checked_mask("f", [[True], [False, True]], [1, 2]) == [[True], [False, True]]


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (None, TypeError, "echo filter 'f' must return a list of lists"),
        ([True], TypeError, "echo filter 'f' must return a list of lists"),
        ([[1]], TypeError, "echo filter 'f' must return bools"),
        ([[True, True]], ValueError, r"echo filter 'f' returned masks of \[2\] tokens .* \[1\]"),
        ([[True], []], ValueError, "echo filter 'f' returned masks"),
    ],
)
def test_a_filters_wrong_answer_names_the_filter(mask, error, message):
    with pytest.raises(error, match=message):
        checked_mask("f", mask, [1])


def rl_inputs(logprobs):
    tokens = len(logprobs)
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        advantages=torch.linspace(-1, 1, tokens),
        weights=torch.ones(tokens),
        sequence_ids=torch.arange(tokens) // 2,
        generator_logprobs=logprobs.detach() - 0.01,
    )


def test_the_fixture_of_the_spec():
    """A = 1 on token 0 (reinforce), alpha = 2 on token 1, one RL token, four that echo."""
    t = torch.tensor([-0.2, -0.4], requires_grad=True)
    inputs = LossInputs(
        logprobs=t[:1],
        old_logprobs=t[:1].detach(),
        advantages=torch.ones(1),
        weights=torch.ones(1),
        sequence_ids=torch.zeros(1, dtype=torch.int64),
    )
    rl = objective(LossConfig(name="reinforce"), inputs)
    echo = echo_loss(t[1:], torch.tensor([2.0]))
    (rl.loss_sum / 1 + echo.loss_sum / 4).backward()
    assert t.grad.tolist() == [-1.0, -0.5]


@pytest.mark.parametrize("loss", LOSSES)
def test_rl_gradients_are_the_same_bits_with_and_without_echo(loss):
    """Whatever the loss: tokens that echo are in no ratio, no trust region and no RL metric."""
    alone = torch.linspace(-3, -0.1, 6).requires_grad_()
    output = objective(LossConfig(name=loss), rl_inputs(alone))
    (output.loss_sum / 6).backward()

    both = torch.cat([alone.detach(), torch.tensor([-5.0, -0.5, -9.0])]).requires_grad_()
    beside = objective(LossConfig(name=loss), rl_inputs(both[:6]))
    echo = echo_loss(both[6:], torch.tensor([0.5, 0.0, -2.0]))
    (beside.loss_sum / 6 + echo.loss_sum / 3).backward()
    assert torch.equal(both.grad[:6], alone.grad)
    assert both.grad[6:].tolist() == pytest.approx([-0.5 / 3, 0.0, 2.0 / 3])
    assert flatten(beside.metrics) == flatten(output.metrics)


def test_what_is_logged():
    logged = flatten(echo_loss(torch.tensor([-1.0, -3.0]), torch.tensor([0.0, 1.0])).metrics)
    assert logged == {
        "echo_nll/mean": 2.0,
        "echo_nll/std": 1.0,
        "echo_nll/max": 3.0,
        "echo_tokens": 2.0,
    }


def test_without_echo_nothing_is_logged_and_nothing_changes():
    logprobs = torch.empty(0, requires_grad=True)
    output = echo_loss(logprobs, None)
    assert output.metrics == {}
    assert output.loss_sum.item() == 0
