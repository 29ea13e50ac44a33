"""A rollout's tokens with everything that is known of each, in columns of one length."""

import re
from collections.abc import Collection, Sequence
from typing import Any

from torchtitan_rl.view.columns import number

EXPORTED = (
    *("advantage", "token_logprobs", "trainer_logprobs", "mismatches", "ratios", "entropies"),
    *("masked", "rl", "echo", "positions"),
)
"""Columns of the trainer's token export, over prompt and completion."""
RENAMED_SINCE_1 = {
    "ids": "tokens",
    "advantages": "advantage",
    "generator_logprobs": "token_logprobs",
}
"""Names in an export: of schema 1, and now."""
KNOWN = frozenset(
    (
        *("prompt_token_ids", "token_ids", "dtypes", "token_logprobs", "token_versions"),
        *("loss_mask", "echo_alpha", "routed_experts"),
    )
)
"""Keys of a saved sequence that are ours; any other is a column that somebody has declared."""
TAKEN = frozenset((*EXPORTED, "own", "exported", "segments", "text"))
"""Names that the page uses for something else."""


def page_columns(
    sequence: dict[str, Any],
    advantage: float | None,
    export: dict[str, Any] | None,
    *,
    trained: bool = True,
) -> dict[str, Any]:
    """Columns over prompt and completion; a column that is not known is left out.

    What the trainer has exported counts; without it, tokens that train have the rollout's
    advantage. An export whose tokens are not those of the sequence is not used. `own` names the
    columns that are none of ours.

    Example:
        >>> one = {"prompt_token_ids": [1], "token_ids": [2], "token_logprobs": [-0.5]}
        >>> page_columns(one, 1.0, None)  # doctest: +NORMALIZE_WHITESPACE
        {'tokens': [1, 2], 'prompt': 1, 'sampled': [0, 1], 'rl': [0, 1], 'advantage': [None, 1.0],
         'token_logprobs': [None, -0.5], 'own': [], 'exported': False}
    """
    prompt, completion = _ids(sequence.get("prompt_token_ids")), _ids(sequence.get("token_ids"))
    tokens = prompt + completion
    versions = _padded(sequence.get("token_versions"), len(prompt), len(tokens))
    logprobs = _padded(sequence.get("token_logprobs"), len(prompt), len(tokens))
    mask = _padded(sequence.get("loss_mask"), 0, len(tokens))
    rl = mask or [0] * len(prompt) + [1] * len(completion)
    columns: dict[str, Any] = {"tokens": tokens, "prompt": len(prompt)}
    columns["sampled"] = _sampled(len(prompt), len(tokens), versions, logprobs)
    alphas = _padded(sequence.get("echo_alpha"), 0, len(tokens))
    echo = [alpha is not None for alpha in alphas or [None] * len(tokens)]
    # As the trainer does: what echoes, whatever its weight, is out of RL.
    columns["rl"] = [int(trained and bool(v) and not e) for v, e in zip(rl, echo, strict=True)]
    if advantage is not None:
        columns["advantage"] = [advantage if trains else None for trains in columns["rl"]]
    if logprobs is not None:
        columns["token_logprobs"] = logprobs
    if versions is not None:
        columns["token_versions"] = [None if v is None or v < 0 else int(v) for v in versions]
    if alphas is not None:
        columns["echo_alpha"] = alphas
        columns["echo"] = [int(trained and echoes) for echoes in echo]
    own = _own_columns(sequence, len(prompt), len(tokens), taken=columns.keys() | TAKEN)
    columns |= {**own, "own": list(own)}
    exported = _exported(export, tokens)
    return {**columns, **(exported or {}), "exported": exported is not None}


def _own_columns(
    sequence: dict[str, Any], prompt: int, tokens: int, *, taken: Collection[str]
) -> dict[str, list[float | None]]:
    """Columns with a number for each token, or each of the completion, that are none of ours."""
    found = {}
    for name, values in sequence.items():
        if name in KNOWN or name in taken or not isinstance(values, list):
            continue
        if not re.fullmatch(r"[A-Za-z]\w{,63}", name, re.ASCII):  # no name of a column
            continue
        padded = _padded(values, max(tokens - len(values), 0), tokens)
        if padded is not None and len(values) in (tokens, tokens - prompt):
            found[name] = padded
    return found


def _exported(export: dict[str, Any] | None, tokens: list[int]) -> dict[str, Any] | None:
    """The columns of an export; None if there is none, or it is of other tokens."""
    if export is None:
        return None
    export = {RENAMED_SINCE_1.get(name, name): values for name, values in export.items()}
    if _ids(export.get("tokens")) != tokens:
        return None
    columns = {name: _padded(export.get(name), 0, len(tokens)) for name in EXPORTED}
    return {name: values for name, values in columns.items() if values is not None}


def segments(columns: dict[str, Any], messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The turns among a sequence's tokens: who said those from `start` to before `end`.

    Example:
        >>> columns = {"tokens": [1, 2, 3], "prompt": 1, "sampled": [0, 1, 0]}
        >>> segments(columns, [{"role": "user"}])
        ... # doctest: +NORMALIZE_WHITESPACE
        [{'who': 'prompt', 'start': 0, 'end': 1}, {'who': 'assistant', 'start': 1, 'end': 2},
         {'who': 'environment', 'start': 2, 'end': 3}]
    """
    prompt, sampled = columns["prompt"], columns["sampled"]
    found = [{"who": "prompt", "start": 0, "end": prompt}] if prompt else []
    start, answers = prompt, _answers(messages)
    for end in range(prompt + 1, len(sampled) + 1):
        if end < len(sampled) and sampled[end] == sampled[start]:
            continue
        who = "assistant" if sampled[start] else "environment"
        if who == "environment":  # named after the messages at this place, where there are such
            who = next(answers, who)
        found.append({"who": who, "start": start, "end": end})
        start = end
    return found


def _answers(messages: Sequence[Any]) -> Any:
    """The roles that speak between two turns of the model, such as "tool" or "tool, user"."""
    roles: list[str] = []
    spoken = False
    for message in messages:
        role = str(message.get("role", "")) if isinstance(message, dict) else ""
        if role != "assistant":
            roles.append(role)
            continue
        if spoken:
            yield ", ".join(dict.fromkeys(filter(None, roles))) or "environment"
        roles, spoken = [], True
    if spoken and roles:
        yield ", ".join(dict.fromkeys(filter(None, roles))) or "environment"


def _sampled(
    prompt: int, total: int, versions: list[Any] | None, logprobs: list[Any] | None
) -> list[int]:
    if versions is not None:
        return [int(v is not None and v >= 0 and i >= prompt) for i, v in enumerate(versions)]
    if logprobs is not None:
        return [int(value is not None) for value in logprobs]
    return [0] * prompt + [1] * (total - prompt)


def _ids(value: Any) -> list[int]:
    """Token ids; -1 for what is none."""
    values = value if isinstance(value, list) else []
    return [v if isinstance(v, int) and 0 <= v < 2**32 else -1 for v in values]


def _padded(values: Any, before: int, length: int) -> list[float | None] | None:
    """Numbers of all tokens, of which the first `before` have none; None if it does not fit."""
    if not isinstance(values, list) or before + len(values) != length:
        return None
    return [None] * before + [number(value) for value in values]
