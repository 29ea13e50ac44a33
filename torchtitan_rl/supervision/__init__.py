"""Processes and actors: where they run, calls with deadlines, and replacement."""
