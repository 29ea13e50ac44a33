"""A trainer whose snapshots take their time, to see who waits for them; and that moves tensors to
host memory as it sleeps, as on a GPU."""

import time

from monarch.actor import concurrent_endpoint

from torchtitan_rl.actors.trainer import Trainer


class SlowTrainer(Trainer):
    """Copies nothing for a while, if it is told to."""

    seconds = 0.0
    offloads = True

    @concurrent_endpoint
    async def publish_in(self, seconds: float) -> None:
        self.seconds = seconds

    def _open_publisher(self, transport):
        publisher = super()._open_publisher(transport)
        publish = type(publisher).publish

        def slowly(*args, **kwargs):
            time.sleep(self.seconds)
            return publish(publisher, *args, **kwargs)

        publisher.publish = slowly
        return publisher
