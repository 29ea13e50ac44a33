"""The controller and what it needs: the actors of a run, checks, warm start, launch."""

from torchtitan_rl.platform.third_party import prepare

prepare()
