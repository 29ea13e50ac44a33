"""The page: `python -m torchtitan_rl.view outputs/<run>` shows a run, also while it goes on.

It only reads what a run has written, and imports nothing of torch or vLLM: it starts at once, and
works on a machine that has only the files. Everything in a rollout is untrusted text.
"""
