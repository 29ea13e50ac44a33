"""HF folders as torchtitan models: loading, parallelism, checkpoints and export."""
