"""The page that shows runs, also while they go on: `python -m torchtitan_rl.view outputs/<run>`.

The viewer reads what a run has written, and writes only the user's notes on it. It imports no torch
and no vLLM: it starts at once, and works on a machine that has only the files. Everything in a
rollout is untrusted text.
"""
