"""Processes and actors: where they run, calls with deadlines, and replacement."""

from torchtitan_rl.platform.third_party import prepare

prepare()
