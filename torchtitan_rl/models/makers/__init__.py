"""Programs that make small models: a tiny Qwen3, and SmolLM2-135M from a wheel."""
