"""The process that tool workers are forked from: it builds the task, once, and runs no tool.

A new worker costs a fork and no import, shares the task's memory with the others, and can be killed
in whatever state a tool has left it. multiprocessing's fork server can do none of this: it knows
modules but no built task, and lives on as long as any worker of it hangs.

The environment sends `+ <number>` and a socket to get a worker that listens there, and
`- <number>` to end it with all that it has started. Workers are named by numbers of the
environment's choosing and reaped only after they were ended, so no signal reaches a stranger that
has got a dead one's process id.
"""

import contextlib
import gc
import os
import pickle
import signal
import socket
import sys
import traceback
from typing import Any

import numpy as np
import torch

from torchtitan_rl.platform.parent import die_with, set_death_signal
from torchtitan_rl.tasks.task import Task
from torchtitan_rl.tasks.tools.calls import LENGTH, Member, failed, make, packed

READY = b"!"
"""The first a worker sends: from here on a call's clock may run."""
REAP_SECONDS = 0.05
"""How often a killed process is looked for, until it is gone."""


def main() -> None:
    """`python -m torchtitan_rl.tasks.tools.fork_server <control> <parent>`, the task on stdin."""
    control, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    die_with(parent)  # while it builds the task, it does not listen
    members: dict[str, Member] = {}
    try:
        config, seed = pickle.load(sys.stdin.buffer)
        task: Task = config.build(seed=seed)
        members = {name: Member(member) for name, member in task.members().items()}
        hello: Any = {name: member.offer for name, member in members.items()}
    except Exception as error:  # of whoever wrote the task: who waits for it is told
        traceback.print_exc()
        hello = failed(error).text
    _read_nothing()
    _reseed()  # imports something when it is first called, which every worker would have to do
    control.send(pickle.dumps(hello))
    set_death_signal(0)  # the end of `control` tells it as well, and leaves it time to clean up
    gc.freeze()  # or collecting garbage would write to, and so copy, all memory that is shared
    Nursery(control, members).run()


class Nursery:
    """Forks workers and ends them, until nobody is left to ask for it."""

    def __init__(self, control: socket.socket, members: dict[str, Member]) -> None:
        self.control, self.members = control, members
        self.workers: dict[int, int] = {}
        """Process ids by number."""
        self.ended: set[int] = set()
        """Process ids that were killed and may not be gone yet."""

    def run(self) -> None:
        while True:
            self.control.settimeout(REAP_SECONDS if self.ended else None)
            with contextlib.suppress(TimeoutError):
                message, fds, _, _ = socket.recv_fds(self.control, 64, 1)
                if not message:  # the environment is gone, even if it was killed
                    break
                sign, number = message.split()
                if sign == b"+":
                    self.fork(int(number), fds[0])
                else:
                    self.end(int(number))
            self.ended = {pid for pid in self.ended if os.waitpid(pid, os.WNOHANG)[0] == 0}
        for orphan in list(self.workers):
            self.end(orphan)

    def fork(self, number: int, fd: int) -> None:
        nursery = os.getpid()
        with socket.socket(fileno=fd) as connection:
            try:
                pid = os.fork()
            except OSError:  # no memory or too many processes: closing the socket says so
                traceback.print_exc()
                return
            if pid == 0:
                self.control.close()
                _work(connection, self.members, nursery)
        self.workers[number] = pid
        _own_group(pid)

    def end(self, number: int) -> None:
        pid = self.workers.pop(number, None)
        if pid is None:  # its fork failed
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self.ended.add(pid)


def _work(connection: socket.socket, members: dict[str, Member], nursery: int) -> None:
    """A worker's whole life; does not return."""
    try:
        die_with(nursery)
        _own_group(0)
        _reseed()
        connection.sendall(READY)
        with connection.makefile("rwb") as stream:
            while header := stream.read(LENGTH.size):
                request = stream.read(LENGTH.unpack(header)[0])
                reply = packed(_answered(members, request))
                stream.write(LENGTH.pack(len(reply)) + reply)
                stream.flush()
    except ConnectionError:  # nobody waits for it any longer
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # Past what the nursery would do at its own end.
    os._exit(0)


def _answered(members: dict[str, Member], request: bytes) -> Any:
    try:
        call = pickle.loads(request)
    except Exception as error:  # a class in the state that cannot be imported, for one
        return failed(error)
    return make(members, call)


def _own_group(pid: int) -> None:
    """Parent and child both do this, so that it is done whoever goes on first."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)


def _reseed() -> None:
    """Unlike `random`, these two would give every worker the same numbers."""
    np.random.seed()
    torch.default_generator.seed()


def _read_nothing() -> None:
    """Programs that a tool starts must not wait for anybody to type."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


if __name__ == "__main__":
    main()
