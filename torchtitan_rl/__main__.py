"""`python -m torchtitan_rl`: the command `torchtitan-rl`."""

from torchtitan_rl.cli.main import entry

if __name__ == "__main__":
    entry()
