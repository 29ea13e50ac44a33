"""The controller and what it needs: actors of a run, warm start, recipes."""
