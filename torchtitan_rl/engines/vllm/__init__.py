"""vLLM as an engine whose weights can be replaced while it runs."""
