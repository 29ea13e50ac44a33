"""Command line of the viewer: `python -m torchtitan_rl.view outputs/<run> [outputs/<other>]`."""

import argparse
import errno
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.core.interrupts import end_on_interrupt

with end_on_interrupt():
    from torchtitan_rl.view.runs import NotARun
    from torchtitan_rl.view.server import open_server
    from torchtitan_rl.view.viewer import Viewer

DEFAULT_PORT = 8765
PROGRAM = "python -m torchtitan_rl.view"


def parser(prog: str = PROGRAM) -> argparse.ArgumentParser:
    """The command line of the viewer."""
    made = argparse.ArgumentParser(
        prog=prog,
        description="Shows runs on a local page: curves, rollouts, tokens, the timeline. "
        "It follows a run that goes on.",
    )
    made.add_argument(
        "folders",
        nargs="*",
        type=Path,
        default=[Path("outputs")],
        metavar="folder",
        help="a run, several to compare, or a folder of runs (default: outputs)",
    )
    made.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, for this machine only; there is no "
        "password)",
    )
    made.add_argument(
        "--port",
        type=int,
        help=f"the port to listen on; 0: any free one (default: {DEFAULT_PORT}, or the next free "
        "one)",
    )
    return made


def main(arguments: Sequence[str] | None = None, *, prog: str = PROGRAM) -> int:
    """Serve the page until Ctrl-C; returns the exit code."""
    options = parser(prog).parse_args(arguments)
    try:
        viewer = Viewer(options.folders)
    except NotARun as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        server = open_server(
            options.host,
            DEFAULT_PORT if options.port is None else options.port,
            viewer.endpoints,
            viewer.changes,
            tries=20 if options.port is None else 1,
        )
    except (OSError, OverflowError) as error:
        viewer.close()
        print(f"error: {why_not(error, options.host, options.port)}", file=sys.stderr)
        return 2
    # A thread of this process makes the index: a response must not wait 5 ms for it each time.
    sys.setswitchinterval(0.0005)
    # `kill` must remove the temporary index as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    viewer.start()
    print(f"{server.url}  (Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            print()  # after the terminal's ^C
    finally:
        server.server_close()
        viewer.close()
    return 0


def why_not(error: Exception, host: str, port: int | None) -> str:
    """Why the page cannot be served, and what to do about it."""
    where = host if port is None else f"{host}:{port}"
    if getattr(error, "errno", None) == errno.EADDRINUSE and port is not None:
        return f"{where} is in use by another program: choose another --port, or leave it out"
    return f"cannot listen on {where}: {error}"


if __name__ == "__main__":
    sys.exit(main())
