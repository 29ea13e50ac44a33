"""Workers that the controller starts itself, one command each, and starts again when they end."""

import asyncio
import contextlib
import re
from collections.abc import Callable, Mapping, Sequence

from torchtitan_rl.hosts.addresses import join_address
from torchtitan_rl.hosts.launchers.launcher import LaunchError
from torchtitan_rl.observability.console import console

LISTENING = re.compile(r"listening at (\S+) port (\d+)")
START_SECONDS = 120.0
"""How long a command may take until its worker listens."""
AGAIN_SECONDS = 5.0
"""How long to wait before a worker that has ended is started again."""
END_SECONDS = 5.0
SAID_LINES = 5
"""Most lines of a command's output that an error quotes."""


class StartedWorker:
    """A worker behind a command whose standard input and output reach it.

    The command is one that ends in `torchtitan-rl worker --stdin`: it reads the secret from its
    first line of input, says where it listens, and ends when its input is closed, also if this
    process is killed.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        secret: str,
        *,
        port: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`command` is that of a worker at a port; with port 0, it keeps the one that it finds."""
        self.name, self._command, self._secret = name, command, secret
        self._port, self._environment = port, environment
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._said: list[str] = []
        self.place = ""
        """Where it listens, `<address>:<port>`; empty until it has said so."""

    async def start(self) -> str:
        """Start it; returns where it listens."""
        await self._start()
        try:
            async with asyncio.timeout(START_SECONDS):
                while not self.place and await self._read_line():
                    pass
        except TimeoutError:
            raise LaunchError(
                f"host {self.name}: its worker has not started within {START_SECONDS:.0f} s"
            ) from None
        if not self.place:
            raise LaunchError(f"host {self.name}: no worker: {self._last_words()}")
        self._keeping = asyncio.create_task(self._keep())
        return self.place

    async def stop(self) -> None:
        """Have it end."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), END_SECONDS)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _start(self) -> None:
        self._said.clear()
        command = self._command(self._port)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the controller alone
                env=self._environment,
            )
        except OSError as error:
            raise LaunchError(
                f"host {self.name}: {command[0]} cannot be run: {error.strerror}"
            ) from error
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._secret}\n".encode())

    async def _read_line(self) -> bool:
        """Note a line of its output; False: it has closed that."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            line = (await self._process.stdout.readline()).decode(errors="replace").rstrip()
        except ValueError:  # a line that is too long is dropped
            return True
        if found := LISTENING.search(line):
            self._port = int(found[2])
            self.place = join_address(found[1], self._port)
        elif line:
            self._said = [*self._said, line][-SAID_LINES:]
        return bool(line) or not self._process.stdout.at_eof()

    def _last_words(self) -> str:
        return " / ".join(self._said) or "its command ended without a word"

    async def _keep(self) -> None:
        """Read on, and start it again when it has ended: its host may have been restarted."""
        printed = ""
        while True:
            while await self._read_line():
                pass
            assert self._process is not None
            await self._process.wait()
            why = f"the worker of host {self.name} has ended ({self._last_words()})"
            if why != printed:
                console.print(f"{why}; starting it again", markup=False)
            printed = why
            await asyncio.sleep(AGAIN_SECONDS)
            with contextlib.suppress(LaunchError):
                await self._start()


async def start_all(workers: Sequence[StartedWorker]) -> list[str]:
    """Start workers side by side; returns where each listens."""
    places = await asyncio.gather(*(worker.start() for worker in workers), return_exceptions=True)
    if errors := [place for place in places if isinstance(place, BaseException)]:
        for other in errors:
            if not isinstance(other, LaunchError):
                raise other
        raise LaunchError("; ".join(map(str, errors)))
    return [str(place) for place in places]


async def stop_all(workers: Sequence[StartedWorker]) -> None:
    """Have workers end, side by side."""
    await asyncio.gather(*(worker.stop() for worker in workers))
