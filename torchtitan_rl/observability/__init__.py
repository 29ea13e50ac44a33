"""What a run writes: console, metrics, run folder, token export and timeline."""
