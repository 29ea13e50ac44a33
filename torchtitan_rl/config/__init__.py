"""Settings of a run, as dataclasses."""
