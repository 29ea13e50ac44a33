"""A rollout's tokens with everything that is known of each, in columns of one length."""

from collections.abc import Sequence
from typing import Any

from torchtitan_rl.view.columns import number

# Column of the page: column of the trainer's export. All of prompt and completion.
EXPORTED = {
    "advantage": "advantages",
    "generator_logprob": "generator_logprobs",
    "trainer_logprob": "trainer_logprobs",
    "mismatch": "mismatches",
    "ratio": "ratios",
    "entropy": "entropies",
    "masked": "masked",
    "rl": "rl",
    "echo": "echo",
    "position": "positions",
}


def token_columns(
    sequence: dict[str, Any],
    advantage: float | None,
    export: dict[str, Any] | None,
    *,
    trained: bool = True,
) -> dict[str, Any]:
    """Columns over prompt and completion; a column that is not known is left out.

    What the trainer has exported counts; without it, tokens that train have the rollout's
    advantage. An export whose tokens are not those of the sequence is not used.

    Example:
        >>> token_columns({"prompt_ids": [1], "ids": [2], "logprobs": [-0.5]}, 1.0, None)
        ... # doctest: +NORMALIZE_WHITESPACE
        {'ids': [1, 2], 'prompt': 1, 'sampled': [0, 1], 'rl': [0, 1], 'advantage': [None, 1.0],
         'generator_logprob': [None, -0.5], 'exported': False}
    """
    prompt, completion = _ids(sequence.get("prompt_ids")), _ids(sequence.get("ids"))
    ids = prompt + completion
    versions = _padded(sequence.get("versions"), len(prompt), len(ids))
    logprobs = _padded(sequence.get("logprobs"), len(prompt), len(ids))
    rl = _padded(sequence.get("mask"), 0, len(ids)) or _of_completion(1, prompt, completion)
    columns: dict[str, Any] = {"ids": ids, "prompt": len(prompt)}
    columns["sampled"] = _sampled(len(prompt), len(ids), versions, logprobs)
    alphas = _padded(sequence.get("alphas"), 0, len(ids))
    echo = [alpha is not None for alpha in alphas or [None] * len(ids)]
    # As the trainer does: what echoes, whatever its weight, is out of RL.
    columns["rl"] = [int(trained and bool(v) and not e) for v, e in zip(rl, echo, strict=True)]
    if advantage is not None:
        columns["advantage"] = [advantage if trains else None for trains in columns["rl"]]
    if logprobs is not None:
        columns["generator_logprob"] = logprobs
    if versions is not None:
        columns["version"] = [None if v is None or v < 0 else int(v) for v in versions]
    if alphas is not None:
        columns["alpha"] = alphas
        columns["echo"] = [int(trained and echoes) for echoes in echo]
    fits = export is not None and _ids(export.get("ids")) == ids
    if export is not None and fits:
        for name, exported in EXPORTED.items():
            values = _padded(export.get(exported), 0, len(ids))
            if values is not None:
                columns[name] = values
    return {**columns, "exported": fits}


def segments(columns: dict[str, Any], messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The turns among a sequence's tokens: who said those from `start` to before `end`.

    Example:
        >>> segments({"ids": [1, 2, 3], "prompt": 1, "sampled": [0, 1, 0]}, [{"role": "user"}])
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


def _of_completion(value: Any, prompt: list[Any], completion: list[Any]) -> list[Any]:
    return [0] * len(prompt) + [value] * len(completion)


def _ids(value: Any) -> list[int]:
    """Token ids; -1 for what is none."""
    values = value if isinstance(value, list) else []
    return [v if isinstance(v, int) and 0 <= v < 2**32 else -1 for v in values]


def _padded(values: Any, before: int, length: int) -> list[float | None] | None:
    """Numbers of all tokens, of which the first `before` have none; None if it does not fit."""
    if not isinstance(values, list) or before + len(values) != length:
        return None
    return [None] * before + [number(value) for value in values]
