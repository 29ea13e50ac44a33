"""Tools of a task: their description, calls, and the worker processes that make calls."""
