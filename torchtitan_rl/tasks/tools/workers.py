"""Worker processes that make tool calls, one at a time each; one that takes too long is killed."""

import asyncio
import contextlib
import os
import pickle
import socket
import subprocess
import sys
from dataclasses import dataclass

import cloudpickle

from torchtitan_rl.tasks.task import Task
from torchtitan_rl.tasks.tools.calls import LENGTH, MAX_RESULT_BYTES, Call, Offer, Result

BUILD_SECONDS = 600.0
"""How long a task may take to build: it may have to read its data."""
START_SECONDS = 60.0
"""How long a fork may take, on a very busy machine."""
STOP_SECONDS = 0.5
"""How long a nursery gets to end by itself."""
MAX_OFFER_BYTES = 2**17
"""More names of tools than any model could choose from."""


class ProcessEndedError(RuntimeError):
    """The process of a call ended before the call did."""


@dataclass(slots=True)
class Worker:
    """One process, idle or in the middle of a call."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, request: bytes) -> Result:
        try:
            self.writer.write(LENGTH.pack(len(request)) + request)
            await self.writer.drain()
            (length,) = LENGTH.unpack(await self.reader.readexactly(LENGTH.size))
            if length > MAX_RESULT_BYTES:
                raise ConnectionError("a tool has written to its worker's connection")
            reply = await self.reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ProcessEndedError("ended its process") from error
        return pickle.loads(reply)


class Workers:
    """Makes calls in processes that are forked on demand and used again.

    Whoever uses it limits how many calls run at a time. No sandbox: a tool that runs what the model
    has written must see to that itself.

    Example:
        workers = Workers(Calculator.Config(), seed=0)
        offers = await workers.start()
        result = await workers.run(Call("calculator", "add", {}, {"a": 1, "b": 2}), seconds=30)
        workers.close()
    """

    def __init__(self, task: Task.Config, *, seed: int) -> None:
        # By value where needed: a task may come from a notebook.
        self._built_from = cloudpickle.dumps((task, seed))
        self._idle: list[Worker] = []
        self._started = 0
        self._nursery: subprocess.Popen | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> dict[str, Offer]:
        """Build the task where workers will be forked from; what its members offer, by name."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._control = ours
        # Not on a thread: while it builds, the kernel ends it with the thread that has started it.
        with theirs:
            self._nursery = _start_nursery(theirs)
        try:
            async with asyncio.timeout(BUILD_SECONDS):
                await asyncio.to_thread(_hand_over, self._nursery, self._built_from)
                hello = await asyncio.get_running_loop().sock_recv(ours, MAX_OFFER_BYTES)
        except BaseException:
            self.close()
            raise
        offers = pickle.loads(hello) if hello else "ended its process"
        if isinstance(offers, str):
            self.close()
            raise RuntimeError(f"building the task {offers}")
        return offers

    async def run(self, call: Call, seconds: float) -> Result:
        """Make a call; raises TimeoutError if it takes longer, ProcessEndedError if it dies."""
        request = pickle.dumps(call)
        worker = await self._take()
        try:
            async with asyncio.timeout(seconds):
                result = await worker.ask(request)
        except BaseException:  # cancellation too: it is in the middle of a call
            self._end(worker)
            raise
        self._idle.append(worker)
        return result

    def close(self) -> None:
        """End the nursery and with it all workers."""
        while self._idle:
            self._idle.pop().writer.close()
        nursery, self._nursery = self._nursery, None
        if nursery is None:
            return
        self._control.close()  # at which it ends its workers and what they have started
        try:
            nursery.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:  # still busy with the task
            nursery.kill()
            nursery.wait()

    async def _take(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if not worker.reader.at_eof():
                return worker
            self._end(worker)  # died while it had nothing to do
        async with self._starting:  # a nursery forks one after the other anyway
            if self._nursery is None or self._nursery.poll() is not None:
                self.close()
                await self.start()
            return await self._start_worker()

    async def _start_worker(self) -> Worker:
        self._started += 1
        ours, theirs = socket.socketpair()
        with theirs:
            self._tell(f"+ {self._started}", theirs)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        worker = Worker(self._started, reader, writer)
        try:
            async with asyncio.timeout(START_SECONDS):
                await reader.readexactly(1)
        except BaseException as error:
            self._end(worker)
            if isinstance(error, TimeoutError | asyncio.IncompleteReadError | ConnectionError):
                raise ProcessEndedError("could not be given a process") from error
            raise
        return worker

    def _end(self, worker: Worker) -> None:
        worker.writer.close()
        self._tell(f"- {worker.number}")

    def _tell(self, message: str, *sockets: socket.socket) -> None:
        """A nursery that cannot be told is dead or stuck: its workers go with it, others come."""
        if self._nursery is None:
            return
        try:
            socket.send_fds(self._control, [message.encode()], [s.fileno() for s in sockets])
        except OSError:
            self.close()


def _start_nursery(control: socket.socket) -> subprocess.Popen:
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torchtitan_rl.tasks.tools.fork_server",
            str(control.fileno()),
            str(os.getpid()),
        ],
        stdin=subprocess.PIPE,
        pass_fds=[control.fileno()],
        # What a tool prints must be in the log before its worker is killed.
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
    )


def _hand_over(nursery: subprocess.Popen, task: bytes) -> None:
    assert nursery.stdin is not None
    with contextlib.suppress(BrokenPipeError), nursery.stdin:  # its silence will be noticed
        nursery.stdin.write(task)
