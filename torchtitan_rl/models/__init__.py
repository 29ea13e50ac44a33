"""HF folders as torchtitan models: loading, parallelism, checkpoints and export."""

from torchtitan_rl.platform.third_party import prepare

prepare()
