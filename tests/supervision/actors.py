"""Actors that tests of supervision spawn. Imports little: workers import it."""

import tempfile
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
