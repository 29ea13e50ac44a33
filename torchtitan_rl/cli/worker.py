"""`torchtitan-rl worker`: lends this machine to the runs of whoever knows the secret."""

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections.abc import Sequence

from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.hosts.addresses import USUAL_PORT, listening_address
from torchtitan_rl.hosts.secret import LEAST_LENGTH, VARIABLE, load_secret
from torchtitan_rl.hosts.worker import Worker


def main(argv: Sequence[str], *, prog: str) -> int:
    """Serve until SIGTERM, Ctrl-C, or as the options say; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Lend this machine to runs: `torchtitan-rl train --hosts <address>,...` of "
        "whoever knows the secret starts its actors here. Nothing is encrypted: use it in "
        "networks that you trust.",
    )
    parser.add_argument(
        "--address",
        required=True,
        help=f"address or name, with :<port> if it is not {USUAL_PORT}, at which to listen, and by "
        "which the other hosts reach this one",
    )
    parser.add_argument(
        "--secret_file",
        default="",
        help="file with the secret (default: the variable TORCHTITAN_RL_SECRET, or "
        "~/.config/torchtitan_rl/secret, which is made if it is not there)",
    )
    parser.add_argument(
        "--allow_public", action="store_true", help="listen at an address that the world may reach"
    )
    parser.add_argument("--once", action="store_true", help="end after the first run")
    parser.add_argument(
        "--stdin",
        action="store_true",
        help="read the secret from standard input, and end when that is closed",
    )
    options = parser.parse_args(argv)
    try:
        address, port = listening_address(options.address, allow_public=options.allow_public)
        secret = read_secret() if options.stdin else load_secret(options.secret_file)
        os.environ.pop(
            VARIABLE, None
        )  # actors, and tools that models call, inherit the environment
        asyncio.run(serve(address, port, secret, once=options.once, watch_stdin=options.stdin))
    except TorchtitanRLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read_secret() -> str:
    """The secret, from the first line of standard input."""
    from torchtitan_rl.hosts.secret import SecretError

    secret = sys.stdin.readline().strip()
    if len(secret) < LEAST_LENGTH:
        raise SecretError(f"--stdin: the first line must be a secret of {LEAST_LENGTH} characters")
    return secret


async def serve(
    address: str, port: int, secret: str, *, once: bool, watch_stdin: bool = False
) -> None:
    """Serve runs at an address until a signal, or the end of standard input."""
    from torchtitan_rl.hosts.facts import examine_host
    from torchtitan_rl.platform.parent import adopt_orphans

    adopt_orphans()
    facts = examine_host(address)
    worker = Worker(address, port, secret=secret, facts=facts, once=once, say=say)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Slurm's launcher has workers ignore SIGTERM, which comes before the run has saved.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, worker.stop)
    if watch_stdin:
        ending = threading.Thread(
            target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(worker.stop)), daemon=True
        )
        ending.start()
    await worker.run()


def say(line: str) -> None:
    """Print a line at once, as logs want it."""
    print(line, flush=True)
