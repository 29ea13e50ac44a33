"""Columns: every kind of per-token data, declared once, and known to every stage of a step.

A column is declared here, or by whoever makes it, and is then known to every stage: a Completion
carries those that its generator has set, turns merge into sequences with them, the saved record and
the rollout replay hold them, an Episode has them, and truncation, validation, packing and the cell
of padding treat them as declared. Nobody lists columns by hand.

A generator of one's own adds a column in two places:

    declare(Column("surprise", "float32", math.nan, covers="completion"))
    ...
    Completion(..., surprise=[0.5, 2.0])
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from torchtitan_rl.core.plugins import nearest

Covers = Literal["tokens", "completion", "episode"]
"""A value for each token of prompt and completion, for each token of the completion, or one value
for all tokens of the episode."""
Maker = Literal["generator", "rollout", "reference", "batching"]
"""Which stage sets a column: the generator on a Completion; the rollout, when its turns become
sequences and these episodes; the reference model or the batching on an Episode."""


@dataclass(frozen=True, slots=True)
class Column:
    """One kind of per-token data.

    Values are a list with a value for each token, an array [tokens, ...] that has a row for each,
    or, if the column covers the episode, one number.
    """

    name: str
    """Name of the column everywhere: attribute of Completion and Episode, key of the saved record,
    stream of a microbatch."""
    dtype: str
    """The dtype of its stream. Values in an array keep the array's own."""
    pad: int | float | bool | Literal["distinct"]
    """The value where there is none: in padding, in tokens that nobody sampled, and in the prompt
    if it covers the completion. `distinct`: 0, 1, 2, ... along the last axis."""
    covers: Covers
    """Which tokens have a value."""
    made_by: Maker = "generator"
    """Which stage sets it."""
    optional: bool = True
    """Whether episodes may lack it: all episodes of a batch have it, or none."""
    gaps: bool = False
    """Whether an episode's values may be NaN, where a token has none."""
    lag: int = 0
    """Tokens at the end of a completion whose value only the next turn of the conversation knows:
    1 for what is computed when a token is read, not when it is sampled."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"the name of a column must be an identifier; got {self.name!r}")
        if self.made_by == "generator" and self.covers == "episode":
            raise ValueError(
                f"column {self.name!r}: a generator makes values of tokens; several turns become "
                "one episode, and a value of each turn would be none of it. Let it cover 'tokens' "
                "or 'completion'"
            )

    def padding(self, tokens: int, shape: tuple[int, ...] = (), dtype: str = "") -> np.ndarray:
        """[tokens, *shape] values that are none."""
        kind = dtype or self.dtype
        if self.pad == "distinct":
            row = np.arange(shape[-1], dtype=kind)
            return np.broadcast_to(row, (tokens, *shape)).copy()
        return np.full((tokens, *shape), self.pad, dtype=kind)

    def to_json(self, values: Any) -> Any:
        """The values as JSON writes them: flags as 0 and 1, arrays as lists."""
        if isinstance(values, np.ndarray):
            return values.tolist()
        return list(map(int, values)) if self.dtype == "bool" else values

    def from_json(self, values: list[Any], dtype: str = "") -> Any:
        """The values that `to_json` was given; JSON has null for NaN."""
        if values and isinstance(values[0], list):
            return np.array(values, dtype=dtype or self.dtype)
        if self.dtype == "bool":
            return list(map(bool, values))
        if self.dtype.startswith("float"):
            return [math.nan if value is None else value for value in values]
        return values


RESERVED = frozenset(
    (
        *("columns", "correct", "dtypes", "finish_reason", "group_id", "length", "name"),
        *("policy_version", "prompt_idx", "prompt_token_ids", "reward", "task", "text"),
        *("token_ids", "tokens"),
    )
)
"""Names that a Completion, an Episode, a saved sequence or a microbatch uses for something else."""

COLUMNS: dict[str, Column] = {}
"""All columns that are declared in this process, by name, in the order of their declaration."""


def declare(column: Column) -> Column:
    """Make a column known to every stage. To declare the same again changes nothing."""
    if column.name in RESERVED:
        raise ValueError(f"a column cannot be called {column.name!r}: the name is in use")
    known = COLUMNS.setdefault(column.name, column)
    if known != column:
        raise ValueError(f"column {column.name!r} is declared already, and differently: {known}")
    return column


def undeclared(name: str) -> str:
    """The message about a name that is no column."""
    return (
        f"nobody has declared a column {name!r} ({nearest(name, COLUMNS)}); "
        "torchtitan_rl.core.columns.declare makes one known"
    )


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that are there, in the order of their declaration; a name that is none is an
    error."""
    for name in given:
        if name not in COLUMNS:
            raise TypeError(undeclared(name))
    return {name: given[name] for name in COLUMNS if given.get(name) is not None}


def columns_of(columns: Mapping[str, Any]) -> Iterator[tuple[Column, Any]]:
    """Each column with its values."""
    for name, values in columns.items():
        if name not in COLUMNS:  # made in another process
            raise TypeError(undeclared(name))
        yield COLUMNS[name], values


LOSS_MASK = declare(Column("loss_mask", "bool", False, "tokens", made_by="rollout", optional=False))
"""Which tokens train by RL, unless they echo: those that were sampled. An episode that is not given
one trains all of its completion."""
# NaN, so that reading a token that nobody sampled is seen, never averaged in.
TOKEN_LOGPROBS = declare(Column("token_logprobs", "float32", math.nan, "completion"))
"""log p(token) under the distribution that the generator sampled from, i.e. after temperature."""
ADVANTAGE = declare(
    Column("advantage", "float32", 0.0, "episode", made_by="rollout", optional=False)
)
TEMPERATURE = declare(
    Column("temperature", "float32", 1.0, "episode", made_by="rollout", optional=False)
)
WEIGHT = declare(Column("weight", "float32", 0.0, "episode", made_by="batching", optional=False))
"""Multiplies an episode's loss; the reduction sets it."""
TOKEN_VERSIONS = declare(Column("token_versions", "int32", -1, "completion"))
"""The weights that sampled each token, -1 where none did."""
REF_LOGPROBS = declare(
    Column("ref_logprobs", "float32", math.nan, "completion", made_by="reference")
)
"""Logprobs under the frozen reference model."""
ROUTED_EXPERTS = declare(Column("routed_experts", "uint8", "distinct", "tokens", lag=1))
"""[tokens, layers with experts, top_k] experts that the router chose in the generator."""
ECHO_ALPHA = declare(
    Column("echo_alpha", "float32", math.nan, "tokens", made_by="rollout", gaps=True)
)
"""Weight of a token's cross-entropy beside RL; NaN where it has none."""
