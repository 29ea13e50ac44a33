"""How long a run may take to stop: as long as a training step and a checkpoint need."""

import math

from torchtitan_rl.config import RunConfig
from torchtitan_rl.models.hf import ModelFolderError, tensor_shapes
from torchtitan_rl.run.starting_model import model_folder

LEAST_SECONDS = 1.5
"""What stopping takes beside training and saving."""
BYTES_PER_PARAMETER = 12
"""A checkpoint has the weight and two moments of AdamW, in fp32."""
RATE = 0.5e9
"""Bytes a second that a rank writes to a slow disk."""


def grace_seconds(config: RunConfig, longest_training: float) -> float:
    """Seconds from Ctrl-C or SIGTERM until a run that has not stopped is ended: those of
    `supervision.grace_seconds`, or what it needs if its training steps took so long."""
    if config.supervision.grace_seconds is not None:
        return config.supervision.grace_seconds
    try:
        shapes = tensor_shapes(model_folder(config))
    except ModelFolderError:  # a warm start is making it: a small one
        shapes = {}
    state = BYTES_PER_PARAMETER * sum(map(math.prod, shapes.values()))
    return LEAST_SECONDS + longest_training + state / RATE / config.trainer.parallelism.world_size
