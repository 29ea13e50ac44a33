"""Worker processes that make tool calls, one at a time each; a call that takes too long is
killed."""

import asyncio
import contextlib
import os
import pickle
import socket
import subprocess
import sys
from dataclasses import dataclass

import cloudpickle

from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.tasks.task import Task
from torchtitan_rl.tasks.tools.calls import LENGTH, MAX_RESULT_BYTES, Call, Offer, Result

BUILD_SECONDS = 600.0
"""How long a task may take to build: it may have to read its data."""
START_SECONDS = 60.0
"""How long a fork may take, on a very busy machine."""
STOP_SECONDS = 0.5
"""How long a fork server gets to end by itself."""
MAX_OFFER_BYTES = 2**17
"""Largest pickle of all offers: room for more tools than any model could choose from."""


class ProcessEndedError(TorchtitanRLError, RuntimeError):
    """A worker process ended before its call did."""


@dataclass(slots=True)
class Worker:
    """One worker process, idle or in the middle of a call."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def request(self, request: bytes) -> Result:
        """Send a pickled call and wait for its result."""
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
    """Pool of worker processes, forked on demand and reused.

    The caller limits how many calls run at a time. There is no sandbox: a tool that runs code of
    the model must provide one itself.

    Example:
        workers = Workers(Calculator.Config(), seed=0)
        offers = await workers.start()
        result = await workers.run(Call("calculator", "add", {}, {"a": 1, "b": 2}), seconds=30)
        workers.close()
    """

    def __init__(self, task: Task.Config, *, seed: int) -> None:
        # cloudpickle sends classes of a notebook by value.
        self._built_from = cloudpickle.dumps((task, seed))
        self._idle: list[Worker] = []
        self._started = 0
        self._server: subprocess.Popen | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> dict[str, Offer]:
        """Start the fork server, which builds the task; returns the offers of its members, by
        name."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._control = ours
        # Not on another thread: the server's death signal fires when the thread that started it
        # ends.
        with theirs:
            self._server = _start_server(theirs)
        try:
            async with asyncio.timeout(BUILD_SECONDS):
                await asyncio.to_thread(_send_task, self._server, self._built_from)
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
        """Make a call in a worker. Raises TimeoutError if it takes longer than `seconds`, and
        ProcessEndedError if the worker dies."""
        request = pickle.dumps(call)
        worker = await self._free_worker()
        try:
            async with asyncio.timeout(seconds):
                result = await worker.request(request)
        except BaseException:  # also cancellation: the worker is in the middle of a call
            self._end(worker)
            raise
        self._idle.append(worker)
        return result

    def close(self) -> None:
        """End the fork server and with it all workers."""
        while self._idle:
            self._idle.pop().writer.close()
        server, self._server = self._server, None
        if server is None:
            return
        self._control.close()  # at which the server ends its workers and what they have started
        try:
            server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:  # still building the task
            server.kill()
            server.wait()

    async def _free_worker(self) -> Worker:
        """An idle worker, or a new one."""
        while self._idle:
            worker = self._idle.pop()
            if not worker.reader.at_eof():
                return worker
            self._end(worker)  # died while it was idle
        async with self._starting:  # the server forks one worker after the other anyway
            if self._server is None or self._server.poll() is not None:
                self.close()
                await self.start()
            return await self._start_worker()

    async def _start_worker(self) -> Worker:
        self._started += 1
        ours, theirs = socket.socketpair()
        with theirs:
            self._send(f"+ {self._started}", theirs)
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
        self._send(f"- {worker.number}")

    def _send(self, message: str, *sockets: socket.socket) -> None:
        """Send a message to the fork server. If that fails it is dead or stuck: it is ended with
        its workers, and the next call starts another."""
        if self._server is None:
            return
        try:
            socket.send_fds(self._control, [message.encode()], [s.fileno() for s in sockets])
        except OSError:
            self.close()


def _start_server(control: socket.socket) -> subprocess.Popen:
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
        # Unbuffered, so that what a tool prints is in the log before its worker is killed.
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
    )


def _send_task(server: subprocess.Popen, task: bytes) -> None:
    assert server.stdin is not None
    with contextlib.suppress(BrokenPipeError), server.stdin:  # `start` notices a dead server
        server.stdin.write(task)
