"""Generator, trainer, reference, grader and environment, each in processes of its own."""

from torchtitan_rl.platform.third_party import prepare

prepare()
