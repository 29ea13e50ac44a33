"""Actors that tests of supervision spawn. Imports little: workers import it."""

from multiprocessing.shared_memory import SharedMemory

from monarch.actor import Actor, endpoint


class Sharer(Actor):
    """Makes shared memory with a name, and never removes it."""

    @endpoint
    async def make(self) -> str:
        self.memory = SharedMemory(create=True, size=64)
        return self.memory.name
