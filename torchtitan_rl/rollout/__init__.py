"""Prompts, conversations, groups and episodes, and the record of them."""
