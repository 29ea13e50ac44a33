"""Number types of a computation."""

from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16"]
"""`auto`: float32 on a CPU, bfloat16 on a GPU."""
