"""What waits for what when weights on a device are copied: the streams and events are recorded in
place of CUDA's."""

import contextlib
import threading

import pytest
import torch

from torchtitan_rl.weight_sync import side_stream, snapshot
from torchtitan_rl.weight_sync.handle import whole_tensors
from torchtitan_rl.weight_sync.side_stream import SideStream, copy_over
from torchtitan_rl.weight_sync.transport import make_publisher


class Module:
    """Stands for torch.cuda: a list of what is asked of it, with the stream it is asked of."""

    def __init__(self):
        self.said = []
        self.current = threading.local()
        module = self

        class Stream:
            def __init__(self, device=None):
                self.name = "side"

            def wait_event(self, event):
                module.said.append(f"{self.name} waits for {event.of}")

        class Event:
            of = ""

            def record(self, stream):
                self.of = f"what {getattr(stream, 'name', 'main')} has queued"
                module.said.append(f"mark {self.of}")

            def synchronize(self):
                module.said.append(f"the thread waits for {self.of}")

        self.Stream, self.Event = Stream, Event

    def current_stream(self, _device):
        return getattr(self.current, "stream", None)

    @contextlib.contextmanager
    def stream(self, stream):
        self.current.stream = stream
        yield
        self.current.stream = None


@pytest.fixture
def module(monkeypatch):
    module = Module()
    monkeypatch.setattr(torch, "get_device_module", lambda _device: module)
    return module


def test_copies_wait_for_what_was_queued_before_and_the_weights_for_the_copies(module, monkeypatch):
    copied = snapshot.copy

    def copy(*arguments):
        module.said.append(f"copy on {module.current_stream(None).name}")
        copied(*arguments)

    monkeypatch.setattr(snapshot, "copy", copy)
    publisher = make_publisher("shm")
    mark = publisher.mark()  # by the trainer's thread, which goes on to queue the next step
    tensors = whole_tensors([("w", torch.ones(3))])
    publisher.publish(tensors, 0, mark=mark, copied=lambda: module.said.append("weights are free"))
    publisher.close()
    assert module.said == [
        "mark what main has queued",
        "side waits for what main has queued",
        "copy on side",
        "mark what side has queued",
        "the thread waits for what side has queued",
        "weights are free",
    ]


def test_weights_are_converted_on_their_device_and_arrive_as_they_are():
    class Weights:
        """Stands for weights on a GPU."""

        device = torch.device("cuda", 0)

        def __init__(self, values):
            self.values = values

        def to(self, dtype):
            return self.values.to(dtype)

    values = [torch.randn(3, 2), torch.randn(5)]
    targets = [torch.zeros_like(v, dtype=torch.bfloat16) for v in values]
    copy_over(targets, [Weights(v) for v in values])
    assert all(torch.equal(t, v.bfloat16()) for t, v in zip(targets, values, strict=True))


def test_values_on_a_gpu_are_compared_there_by_their_bytes():
    class OnGpu(torch.Tensor):
        is_cuda = True

        def numpy(self):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    held = torch.tensor([torch.nan, 0.0, 1.0]).as_subclass(OnGpu)
    assert snapshot._equal(held, held.clone())
    assert not snapshot._equal(held, torch.tensor([torch.nan, -0.0, 1.0]).as_subclass(OnGpu))


class Cudart:
    """Stands for CUDA's runtime."""

    def __init__(self, error):
        self.error, self.pinned = error, {}

    def cudaHostRegister(self, address, nbytes, flags):
        if not self.error:
            self.pinned[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0


@pytest.mark.parametrize("error", [0, 2])
def test_memory_is_pinned_as_long_as_it_is_there(module, monkeypatch, error):
    cudart, said = Cudart(error), []
    # Not by caplog: Sphinx, in the same process, takes its handler away.
    monkeypatch.setattr(side_stream._log, "warning", lambda text, *of: said.append(text % of))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    side = SideStream(torch.device("cuda", 0))
    one, other = (torch.zeros(100, dtype=torch.uint8) for _ in range(2))
    side.pin(one)
    side.pin(other)
    assert list(cudart.pinned.values()) == ([] if error else [100, 100])
    assert len(said) == (2 if error else 0)
    assert all("cannot be pinned (CUDA error 2)" in text for text in said)
    side.unpin(one)
    assert list(cudart.pinned) == ([] if error else [other.data_ptr()])
    side.unpin(other)
    assert not cudart.pinned


def test_every_buffer_of_a_gpus_publisher_is_pinned_and_unpinned(module, monkeypatch):
    cudart = Cudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    publisher = make_publisher("shm", device="cuda:0")
    tensors = whole_tensors([("w", torch.ones(3))])
    for version in range(3):
        publisher.publish(tensors, version)
    assert len(cudart.pinned) == 2
    publisher.close()
    assert not cudart.pinned
