"""Fork server of tool workers: a process that builds the task once, and runs no tool itself.

A new worker costs a fork and no import, shares the task's memory with the others, and can be killed
in whatever state a tool has left it. multiprocessing's fork server can do none of this: it preloads
modules but no built task, and lives as long as any of its workers hangs.

The environment sends `+ <number>` and a socket to get a worker that listens there, and
`- <number>` to end the worker with all processes that it has started. The environment chooses the
numbers. Workers are reaped only after they were ended, so no signal reaches a process that has got
the id of a dead worker.
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
from torchtitan_rl.platform.titles import show_title
from torchtitan_rl.tasks.task import Task
from torchtitan_rl.tasks.tools.calls import LENGTH, Member, failed, make, packed

READY = b"!"
"""First byte that a worker sends: a call's deadline may count from here on."""
REAP_SECONDS = 0.05
"""How often killed processes are polled, until they are gone."""


def main() -> None:
    """`python -m torchtitan_rl.tasks.tools.fork_server <control> <parent>`, the task on stdin."""
    control, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    show_title("tools")
    die_with(parent)  # while the task is built, nobody reads `control`
    members: dict[str, Member] = {}
    try:
        config, seed = pickle.load(sys.stdin.buffer)
        task: Task = config.build(seed=seed)
        members = {name: Member(member) for name, member in task.members().items()}
        hello: Any = {name: member.offer for name, member in members.items()}
    except Exception as error:  # raised by the user's task: reported to the environment
        traceback.print_exc()
        hello = failed(error).text
    _read_nothing()
    _reseed()  # its first call imports a module, which else every worker would do
    control.send(pickle.dumps(hello))
    set_death_signal(0)  # from here on the end of `control` suffices, and leaves time to clean up
    gc.freeze()  # else garbage collection would write to, and so copy, all shared memory
    ForkServer(control, members).run()


class ForkServer:
    """Forks workers and ends them, until the environment closes its connection."""

    def __init__(self, control: socket.socket, members: dict[str, Member]) -> None:
        self.control, self.members = control, members
        self.workers: dict[int, int] = {}
        """Process ids of the workers, by number."""
        self.ended: set[int] = set()
        """Process ids of killed workers that are not reaped yet."""

    def run(self) -> None:
        """Serve requests until the environment is gone, then end all workers."""
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
        """Fork a worker that serves the socket `fd`."""
        server = os.getpid()
        with socket.socket(fileno=fd) as connection:
            try:
                pid = os.fork()
            except OSError:  # no memory or too many processes: closing the socket says so
                traceback.print_exc()
                return
            if pid == 0:
                self.control.close()
                _work(connection, self.members, server)
        self.workers[number] = pid
        _own_group(pid)

    def end(self, number: int) -> None:
        """Kill a worker and all processes that it has started."""
        pid = self.workers.pop(number, None)
        if pid is None:  # its fork failed
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self.ended.add(pid)


def _work(connection: socket.socket, members: dict[str, Member], server: int) -> None:
    """Serve calls as a worker; does not return."""
    try:
        die_with(server)
        _own_group(0)
        _reseed()
        connection.sendall(READY)
        with connection.makefile("rwb") as stream:
            while header := stream.read(LENGTH.size):
                request = stream.read(LENGTH.unpack(header)[0])
                reply = packed(_result_of(members, request))
                stream.write(LENGTH.pack(len(reply)) + reply)
                stream.flush()
    except ConnectionError:  # nobody waits for the result any longer
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    # Skips the exit handlers of the fork server.
    os._exit(0)


def _result_of(members: dict[str, Member], request: bytes) -> Any:
    try:
        call = pickle.loads(request)
    except Exception as error:  # such as a class in the state that cannot be imported
        return failed(error)
    return make(members, call)


def _own_group(pid: int) -> None:
    """Put a process in a group of its own. Parent and child both call this, as either may run
    first."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)


def _reseed() -> None:
    """Reseed numpy and torch, which would give every worker the same numbers (`random` does
    not)."""
    np.random.seed()
    torch.default_generator.seed()


def _read_nothing() -> None:
    """Replace standard input by nothing, so that programs that a tool starts do not wait for it."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


if __name__ == "__main__":
    main()
