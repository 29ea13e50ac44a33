"""The layout of saved rollouts, and how older ones are read. Imports nothing: the page uses it."""

from typing import Any

SCHEMA = 2
"""Schema number of the records; it goes up when a reader of older ones would misunderstand them.

1: a sequence had names of its own for its columns; the untrained share was called held out, and
   discarded rollouts dropped.
2: a sequence has the names that Completion and Episode have.
"""

RENAMED_SINCE_1 = {
    "prompt_ids": "prompt_token_ids",
    "ids": "token_ids",
    "logprobs": "token_logprobs",
    "versions": "token_versions",
    "mask": "loss_mask",
    "alphas": "echo_alpha",
    "experts": "routed_experts",
}
"""Names in a sequence: of schema 1, and now."""
RENAMED_SPLITS = {"held out": "untrained", "dropped": "discarded"}
"""Names of splits: of schema 1, and now."""


def upgraded(record: dict[str, Any]) -> dict[str, Any]:
    """A record of any schema in the layout of the newest; whatever it holds, it is not refused.

    Example:
        >>> upgraded({"schema": 1, "split": "held out", "sequences": [{"ids": [7]}]})
        {'schema': 2, 'split': 'untrained', 'sequences': [{'token_ids': [7]}]}
    """
    schema = record.get("schema")
    if isinstance(schema, int) and schema > 1:
        return record
    record = {**record, "schema": SCHEMA, "split": upgraded_split(record.get("split"))}
    sequences = record.get("sequences")
    if isinstance(sequences, list):
        record["sequences"] = [_upgraded_sequence(sequence) for sequence in sequences]
    return record


def upgraded_split(split: Any) -> Any:
    """The name that a split has now."""
    return RENAMED_SPLITS.get(split, split) if isinstance(split, str) else split


def _upgraded_sequence(sequence: Any) -> Any:
    if not isinstance(sequence, dict):
        return sequence
    return {RENAMED_SINCE_1.get(name, name): values for name, values in sequence.items()}
