"""A trainer that is looked at: what its passes wait for, and checkpoints that take their time."""

import threading
from collections import Counter
from dataclasses import replace

from monarch.actor import concurrent_endpoint
from torch.distributed.checkpoint import FileSystemWriter

from tests.actors.slow_trainer import SlowTrainer
from tests.reads import counting
from torchtitan_rl.actors.trainer import computes


class StudiedTrainer(SlowTrainer):
    """Writes nothing for a while, if it is told to; and counts what its passes do."""

    @concurrent_endpoint
    async def hold_checkpoint(self, method: str) -> None:
        """Let a checkpoint's writer wait before one of its methods."""
        written, self.go_on = getattr(FileSystemWriter, method), threading.Event()

        def held(*args, **kwargs):
            self.go_on.wait()
            return written(*args, **kwargs)

        setattr(FileSystemWriter, method, held)

    @concurrent_endpoint
    async def write_on(self) -> None:
        self.go_on.set()

    @computes
    def change(self, **settings) -> None:
        """Change settings that are read whenever they matter."""
        self.config = replace(self.config, **settings)

    @computes
    def count(self, grid, *, loss=None) -> tuple[Counter, Counter]:
        """What the CPU reads between the start of a forward pass and the end of its backward pass,
        and the collectives meanwhile, over the microbatches of a batch. No step is taken."""
        reads, collectives = Counter(), Counter()
        passed = self._forward_backward

        def counted(*args, **kwargs):
            with counting(reads, collectives):
                return passed(*args, **kwargs)

        self._forward_backward, tokens, self.tokens = counted, self.tokens, None
        try:
            self._accumulate(grid, loss or self.config.loss)
        finally:
            del self._forward_backward
            self.tokens = tokens
            self.optimizers.zero_grad()
        return reads, collectives
