"""Entry point of every worker process: Monarch's own, without Ctrl-C and quiet on the console.

Only the controller may act on SIGINT: it saves a checkpoint through the very workers that would
otherwise be dead already. The terminal sends it to none of them, as each is in a group of its own;
it is ignored for whoever sends it to all processes of a run, and until the group is made.

Nor is the terminal a worker's to read or to set. Libraries of kernels import readline, which sets
it; a process of a background group would be stopped for that, without a word.
"""

import gc
import multiprocessing
import os
import signal

from torchtitan_rl.platform.garbage import THRESHOLDS
from torchtitan_rl.platform.parent import die_with
from torchtitan_rl.platform.titles import show_title

LOG_VARIABLE = "TORCHTITAN_RL_LOG_FILE"
PARENT_VARIABLE = "TORCHTITAN_RL_PARENT"


def main() -> None:
    # Monarch sees to it too, but later, and does not notice if the parent is gone by then.
    die_with(int(os.environ[PARENT_VARIABLE]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A group with its own id: what it starts is found by that, also when this process is gone.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    show_title()
    if log_file := os.environ.get(LOG_VARIABLE):
        # Descriptors, not sys.stdout: native libraries write too, not least when they crash.
        fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
    multiprocessing.set_start_method("forkserver", force=True)
    # What is imported stays: to look for garbage in it takes a tenth of the time that a start does.
    gc.set_threshold(*THRESHOLDS)
    from monarch._src.actor.bootstrap_main import invoke_main

    invoke_main()


if __name__ == "__main__":
    main()
