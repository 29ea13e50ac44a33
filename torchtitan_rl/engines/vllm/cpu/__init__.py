"""Changes to vLLM on a CPU."""
