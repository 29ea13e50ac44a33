"""Ways to start a worker on every machine of a run: each module has one."""
