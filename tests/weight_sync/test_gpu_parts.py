"""The lines of `collective` that only a GPU reaches, with stand-ins for CUDA and NCCL: gloo sends
in place of NCCL."""

import os
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
    _no_watchdog,
    connected_store,
    join,
    listening_store,
    transfer,
)
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.side_stream import SideStream
from torchtitan_rl.weight_sync.transport import make_publisher


class Work:
    """A transfer by gloo with the states of NCCL's: one that failed is completed, too."""

    def __init__(self, work):
        self.error = None
        self.ended = threading.Event()
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work):
        try:
            work.wait(timedelta(seconds=20))
        except RuntimeError as error:
            self.error = error
        self.ended.set()

    def is_completed(self):
        return self.ended.is_set()

    def wait(self, timeout):
        if not self.ended.wait(timeout.total_seconds()):
            raise dist.DistBackendError("timed out in blocking wait")
        if self.error is not None:
            raise self.error
        return True


class Nccl:
    """Stands for torch's ProcessGroupNCCL, which when made does not wait for the other end."""

    Options = SimpleNamespace

    def __init__(self, store, rank, size, options):
        assert options._timeout == timedelta(seconds=20)
        # Else torch's watchdog would end the process when a transfer fails.
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
        pool = ThreadPoolExecutor(1)
        self.group = pool.submit(dist.ProcessGroupGloo, store, rank, size, timedelta(seconds=20))
        pool.shutdown(wait=False)
        self.aborted = False

    def send(self, tensors, rank, tag):
        return Work(self.group.result().send(tensors, rank, tag))

    def recv(self, tensors, rank, tag):
        return Work(self.group.result().recv(tensors, rank, tag))

    def abort(self):
        self.aborted, self.group = True, None


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
    with pytest.raises(LinkError, match="timed out"):
        transfer(reader, [torch.zeros(9, dtype=torch.uint8)], sending=False)
    assert reader._group.aborted  # else its kernel would stay on the GPU


def test_a_transfer_that_failed_is_an_error(ends):
    trainer, reader = ends
    work = reader.receive(torch.zeros(9, dtype=torch.uint8))
    trainer.close()
    assert work.ended.wait(20)
    assert work.is_completed()  # as of NCCL: this says nothing about the bytes
    with pytest.raises(LinkError, match="onnection"):
        reader.wait(work)
    assert reader._group.aborted


@pytest.mark.parametrize("before", [None, "0"])
def test_other_groups_keep_their_watchdog(monkeypatch, before):
    if before is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
    with _no_watchdog():
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before


class Gpu(str):
    """Stands for a GPU to which memory of the CPU belongs."""

    type = "cuda"


def test_what_is_received_on_a_device_is_no_shared_memory(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(receiving, "_near", lambda *_: Gpu("cpu"))
    monkeypatch.setattr(receiving, "SideStream", lambda _: SideStream(cpu))
    monkeypatch.setattr(receiving.Link, "_receive_shared", None)
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
