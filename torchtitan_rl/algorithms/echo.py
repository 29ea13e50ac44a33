"""Echo: which tokens train by cross-entropy, beside RL and from the same forward pass.

In a rollout of several turns, the model learns from the environment's tokens how the environment
answers. The weight of a token is a stream of its own, `echo_alpha`, apart from the advantages.
"""

from collections.abc import Callable, Sequence

from torchtitan_rl.config.echo import EchoConfig, RoleEcho, ToolEcho
from torchtitan_rl.core.errors import describe_error
from torchtitan_rl.core.plugins import check_arguments, resolve
from torchtitan_rl.core.types import Attribution


def echo_alphas(
    config: EchoConfig,
    attributions: Sequence[Attribution | None],
    allowed: Sequence[bool] | None = None,
    *,
    first_turn: bool = False,
) -> list[float | None]:
    """Echo weight of each token of a turn; None for a token that does not echo.

    A filter's `allowed` can only exclude tokens. Token 0 never echoes: nothing predicts it. Words
    of the assistant that the prompt shows echo in the first turn only: there they are
    demonstrations, later they are the conversation's own history.

    Example:
        >>> tool = Attribution("tool", content=True, tool_name="calculator")
        >>> echo_alphas(EchoConfig(tool=ToolEcho(alpha=0.5)), [None, tool, None, tool])
        [None, 0.5, None, 0.5]
    """
    alphas = [_alpha(config, attribution, first_turn) for attribution in attributions]
    if allowed is not None:
        alphas = [a if keep else None for a, keep in zip(alphas, allowed, strict=True)]
    return [None, *alphas[1:]] if alphas else []


def _alpha(config: EchoConfig, token: Attribution | None, first_turn: bool) -> float | None:
    if token is None or not token.content:
        return None
    if token.role == "assistant" and not token.sampled and not first_turn:
        return None  # an earlier turn has trained it
    chosen: RoleEcho | None = getattr(config, token.role)
    if chosen is None:
        return None
    names = chosen.tool_names if isinstance(chosen, ToolEcho) else None
    if names is not None and token.tool_name not in names:
        return None
    return chosen.alpha


def check_filter(config: EchoConfig) -> None:
    """Refuse an echo filter that cannot be imported, or called with its keyword arguments."""
    if config.filter:
        builtins: dict[str, Callable] = {}
        function = resolve(config.filter, builtins, what="echo filter")
        check_arguments(config.filter, function, config.filter_kwargs, what="echo filter")


def call_filter(config: EchoConfig, rollout: object) -> object:
    """Result of the echo filter for a rollout; an error names the filter."""
    function: Callable = resolve(config.filter, {}, what="echo filter")
    try:
        return function(rollout, **config.filter_kwargs)
    except Exception as error:
        said = describe_error(error, config.filter.partition(":")[0])
        raise ValueError(f"echo filter {config.filter!r} raised {said}") from error


def checked_mask(name: str, mask: object, lengths: Sequence[int]) -> list[list[bool]]:
    """Mask that the echo filter `name` returned, checked against the turns' `lengths` in tokens."""
    if not isinstance(mask, list) or not all(isinstance(turn, list) for turn in mask):
        raise TypeError(f"echo filter {name!r} must return a list of lists of bools; got {mask!r}")
    if [len(turn) for turn in mask] != list(lengths):
        raise ValueError(
            f"echo filter {name!r} returned masks of {[len(turn) for turn in mask]} tokens for "
            f"turns of {list(lengths)}"
        )
    if any(not isinstance(keep, bool) for turn in mask for keep in turn):
        raise TypeError(f"echo filter {name!r} must return bools only")
    return mask
