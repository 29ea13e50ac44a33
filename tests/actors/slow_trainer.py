"""A trainer whose snapshots take their time, to see who waits for them."""

import time

from torchtitan_rl.actors.trainer import Trainer

SECONDS = 1.5


class SlowTrainer(Trainer):
    """Copies nothing for a while."""

    def _open_publisher(self, transport):
        publisher = super()._open_publisher(transport)
        publish = type(publisher).publish

        def slowly(*args, **kwargs):
            time.sleep(SECONDS)
            return publish(publisher, *args, **kwargs)

        publisher.publish = slowly
        return publisher
