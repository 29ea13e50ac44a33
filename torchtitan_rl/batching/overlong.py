"""Policies for episodes that are longer than a microbatch."""

from collections.abc import Sequence

from torchtitan_rl.batching.schema import describe, truncate
from torchtitan_rl.config.trainer import Overlong
from torchtitan_rl.core.types import Episode


def limit_length(
    episodes: Sequence[Episode], most: int, policy: Overlong
) -> tuple[list[Episode], dict[str, float]]:
    """Episodes of at most `most` tokens, and how many were truncated and dropped for that.

    `truncate` cuts completions at the end; an episode whose prompt alone is too long is dropped.

    Example:
        kept, counts = limit_length(episodes, 4096, "drop")
    """
    kept: list[Episode] = []
    truncated = 0
    for episode in episodes:
        if episode.length <= most:
            kept.append(episode)
        elif policy == "error":
            raise ValueError(
                f"{describe(episode)} has {episode.length} tokens; "
                f"trainer.tokens_per_microbatch is {most}: raise it, or set trainer.overlong to "
                "truncate or drop"
            )
        elif policy == "truncate" and len(episode.prompt_token_ids) < most:
            kept.append(truncate(episode, most))
            truncated += 1
    dropped = len(episodes) - len(kept)
    return kept, {"overlong/truncated": truncated, "overlong/dropped": dropped}
