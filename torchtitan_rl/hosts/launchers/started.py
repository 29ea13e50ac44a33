"""Workers that the controller starts itself, one command each, and starts again when they end."""

import asyncio
import contextlib
import re
from collections.abc import Mapping, Sequence

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
        command: Sequence[str],
        secret: str,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._command, self._secret = name, command, secret
        self._environment = environment
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
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the controller alone
                env=self._environment,
            )
        except OSError as error:
            raise LaunchError(
                f"host {self.name}: {self._command[0]} cannot be run: {error.strerror}"
            ) from error
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._secret}\n".encode())

    async def _read_line(self) -> bool:
        """Note a line of its output; False: it has closed that."""
        assert self._process is not None
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode(errors="replace").rstrip()
        if found := LISTENING.search(line):
            self.place = f"{found[1]}:{found[2]}"
        elif line:
            self._said = [*self._said, line][-SAID_LINES:]
        return bool(line) or not self._process.stdout.at_eof()

    def _last_words(self) -> str:
        return " / ".join(self._said) or "its command ended without a word"

    async def _keep(self) -> None:
        """Read on, and start it again when it has ended: its host may have been restarted."""
        while True:
            while await self._read_line():
                pass
            assert self._process is not None
            await self._process.wait()
            console.print(
                f"the worker of host {self.name} has ended ({self._last_words()}); starting it "
                "again",
                markup=False,
            )
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
