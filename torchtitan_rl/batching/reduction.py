"""Reductions of the loss: what weighs the same in a batch.

The controller sets the weights from all episodes of the batch, so that no split into microbatches
and ranks can change the result.
"""

from collections import Counter
from collections.abc import Sequence

from torchtitan_rl.batching.schema import loss_mask
from torchtitan_rl.core.types import Episode


def weigh(episodes: Sequence[Episode], reduction: str, *, fixed_length: int) -> list[Episode]:
    """The episodes with weights that make Σ weight·loss / N the given reduction, where N is the
    number of tokens that train.

    Example:
        Two episodes of 1 and 3 tokens: token_mean gives every token 1/4 of the loss;
        sequence_mean gives the one token 1/2, and each of the three 1/6.
    """
    lengths = [sum(loss_mask(e)) for e in episodes]
    tokens = sum(lengths)
    trained = sum(length > 0 for length in lengths)
    by_prompt: Counter[str] = Counter()
    for episode, length in zip(episodes, lengths, strict=True):
        by_prompt[episode.group_id] += length
    prompts = sum(length > 0 for length in by_prompt.values())

    def weight(episode: Episode, length: int) -> float:
        if length == 0 or reduction == "token_mean":
            return 1.0
        if reduction == "sequence_mean":
            return tokens / (trained * length)
        if reduction == "prompt_mean":
            return tokens / (prompts * by_prompt[episode.group_id])
        return tokens / (trained * fixed_length)

    return [e.with_columns(weight=weight(e, n)) for e, n in zip(episodes, lengths, strict=True)]
