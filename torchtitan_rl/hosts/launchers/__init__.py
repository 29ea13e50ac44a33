"""Launchers: how the workers of a run get started, and where they are. One file each."""
