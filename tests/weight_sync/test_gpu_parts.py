"""The lines of `collective` that only a GPU reaches, with stand-ins for CUDA and NCCL: gloo sends
in place of NCCL."""

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from torchtitan_rl.weight_sync import receiving
from torchtitan_rl.weight_sync.handle import WeightSyncError, whole_tensors
from torchtitan_rl.weight_sync.pair import (
    READER,
    TRAINER,
    LinkError,
    NcclPair,
    connected_store,
    join,
    listening_store,
    transfer,
)
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.transport import make_publisher


class Work:
    """Done when gloo's is; NCCL's says so, and nobody has to wait for it."""

    def __init__(self, work):
        self.done = False
        threading.Thread(target=self._wait, args=(work,), daemon=True).start()

    def _wait(self, work):
        work.wait(timedelta(seconds=20))
        self.done = True

    def is_completed(self):
        return self.done


class Nccl:
    """Stands for torch's ProcessGroupNCCL."""

    Options = SimpleNamespace

    def __init__(self, store, rank, size, options):
        assert options._timeout >= timedelta(days=1)  # NCCL's own would end the process
        self.group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))
        self.aborted = False

    def send(self, tensors, rank, tag):
        return Work(self.group.send(tensors, rank, tag))

    def recv(self, tensors, rank, tag):
        return Work(self.group.recv(tensors, rank, tag))

    def abort(self):
        self.aborted = True


@pytest.fixture
def ends(monkeypatch):
    """Both ends of a pair of GPUs."""
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    listening = listening_store("127.0.0.1", 20)
    connected = connected_store("127.0.0.1", listening.port, 20)
    how = {"address": "127.0.0.1", "seconds": 20}
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(join, connected, READER, "cuda", **how)
        return join(listening, TRAINER, "cuda:1", **how), other.result()


def test_bytes_go_through_nccl_in_order(ends):
    trainer, reader = ends
    assert isinstance(trainer, NcclPair)
    assert isinstance(reader, NcclPair)
    sent = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in (1, 5000, 3, 70, 8, 9)]
    received = [torch.zeros_like(data) for data in sent]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(transfer, trainer, sent, sending=True)
        transfer(reader, received, sending=False)
        sending.result()
    assert all(map(torch.equal, sent, received))
    trainer.close()
    assert trainer._group.aborted


def test_a_gpu_does_not_wait_for_ever(ends):
    _, reader = ends
    reader._seconds = 0.1
    with pytest.raises(LinkError, match=r"nothing has come through NCCL for 0.1 s"):
        reader.wait(SimpleNamespace(is_completed=lambda: False))
    assert reader._group.aborted  # else its kernel would stay on the GPU


def test_what_is_received_on_a_device_is_no_shared_memory(monkeypatch):
    monkeypatch.setattr(receiving, "this_host", str)
    monkeypatch.setattr(
        receiving.Link,
        "_receive_shared",
        lambda link, n, bounds, here, _: link._receive_on_device(n, bounds, here.slots),
    )
    publisher = make_publisher("collective")
    for version in range(2):
        tensor = torch.randn(100, 3)
        handle = publisher.publish(whole_tensors([("w", tensor)]), version)
        with open_snapshot(handle) as snapshot:
            snapshot.verify()
            assert torch.equal(dict(snapshot.tensors())["w"], tensor)
            assert snapshot.received == tensor.nbytes
    publisher.close()


def test_a_reader_without_a_gpu_is_told_what_to_set():
    with pytest.raises(WeightSyncError, match=r"on a GPU, and there is none here.* shm, rdma or"):
        receiving._near("cuda", None)


def test_who_receives_on_a_gpu_does_so_on_its_own(monkeypatch):
    own = torch.device("cuda", 2)
    assert receiving._near("cuda", own) == own
    assert receiving._near("cpu", own) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert receiving._near("cuda", None) == torch.device("cuda", 1)
