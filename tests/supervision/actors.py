"""Actors that tests of supervision spawn. Imports little: workers import it."""

import sys
import tempfile
import termios
from multiprocessing.shared_memory import SharedMemory

from monarch.actor import Actor, endpoint


class Sharer(Actor):
    """Makes shared memory with a name and a temporary file, and never removes them."""

    @endpoint
    async def make(self) -> str:
        self.memory = SharedMemory(create=True, size=64)
        return self.memory.name

    @endpoint
    async def make_file(self) -> str:
        return tempfile.mkstemp()[1]


class Printer(Actor):
    """Prints."""

    @endpoint
    async def say(self, text: str) -> None:
        print(text, flush=True)


class TerminalUser(Actor):
    """Does what readline does when it is imported: reads and sets the terminal."""

    @endpoint
    async def use(self) -> str:
        with open("/dev/tty") as terminal:
            settings = termios.tcgetattr(terminal)
            termios.tcsetattr(terminal, termios.TCSADRAIN, settings)
        return f"set it, and read {sys.stdin.read()!r}"
