"""`torchtitan-rl <command>`: finds the command and passes the other arguments on to it."""

import os
import sys
from collections.abc import Callable, Sequence

from torchtitan_rl.core.plugins import nearest

PROGRAM = "torchtitan-rl"


def train(arguments: Sequence[str]) -> int:
    """Train a model: a recipe, and changes to its settings."""
    from torchtitan_rl.cli.train import main

    return main(arguments, prog=f"{PROGRAM} train")


def plan(arguments: Sequence[str]) -> int:
    """Say what a run will take of memory and time, on GPUs or on this machine."""
    from torchtitan_rl.cli.plan import main

    return main(arguments, prog=f"{PROGRAM} plan")


def view(arguments: Sequence[str]) -> int:
    """Show runs on a local page: curves, rollouts, tokens, the timeline."""
    from torchtitan_rl.view.__main__ import main

    return main(arguments, prog=f"{PROGRAM} view")


def list_recipes(arguments: Sequence[str]) -> int:
    """List the recipes: the built-in ones, and those of the folder you are in."""
    from torchtitan_rl.cli.recipes import main

    return main(arguments, prog=f"{PROGRAM} list")


def model(arguments: Sequence[str]) -> int:
    """Make SmolLM2-135M-Instruct, a small real model, in outputs/models."""
    from torchtitan_rl.models.makers.smollm2 import main

    return main(list(arguments), prog=f"{PROGRAM} model")


def doctor(arguments: Sequence[str]) -> int:
    """Say whether this machine can train, and what to do where it cannot."""
    from torchtitan_rl.cli.doctor import main

    return main(arguments, prog=f"{PROGRAM} doctor")


def kubernetes(arguments: Sequence[str]) -> int:
    """Print manifests that run a recipe in a Kubernetes cluster."""
    from torchtitan_rl.cli.kubernetes import main

    return main(arguments, prog=f"{PROGRAM} kubernetes")


def worker(arguments: Sequence[str]) -> int:
    """Lend this machine to runs on several hosts."""
    from torchtitan_rl.cli.worker import main

    return main(arguments, prog=f"{PROGRAM} worker")


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "plan": plan,
    "view": view,
    "list": list_recipes,
    "model": model,
    "doctor": doctor,
    "kubernetes": kubernetes,
    "worker": worker,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        import torchtitan_rl

        print(torchtitan_rl.__version__)
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f"error: unknown command {name!r}; {nearest(name, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[name](rest)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # of `torchtitan-rl list | head`: nobody reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def usage() -> str:
    """What `torchtitan-rl --help` prints."""
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:{width}}{run.__doc__}" for name, run in COMMANDS.items()]
    commands = "\n".join(lines)
    return f"usage: {PROGRAM} <command> ...\n\n{commands}\n\n{PROGRAM} <command> --help says more."


def entry() -> None:
    """Run the command line of this process, and end the process."""
    leave(main())


def leave(code: int) -> None:
    """End this process. Everything is written and every process gone by now; taking torch and
    Monarch apart, as a normal exit does, takes seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "torch" in sys.modules:
        os._exit(code)
    sys.exit(code)
