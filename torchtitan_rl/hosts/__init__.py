"""Machines of a run: a worker process on each, and the controller's connection to it."""

from torchtitan_rl.platform.third_party import prepare

prepare()
