"""Seeds that depend on what is sampled, and not on when or where."""

import hashlib


def sample_seed(run_seed: int, group_id: str, sample: int) -> int:
    """A seed that depends on run, group and sample, and on nothing else: not on timing or order.

    Example:
        >>> sample_seed(0, "0/1", 0) != sample_seed(0, "0/10", 0)
        True
    """
    digest = hashlib.blake2b(f"{run_seed}|{group_id}|{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # vLLM takes a signed 64-bit seed
