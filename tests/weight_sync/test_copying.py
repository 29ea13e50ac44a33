"""Copies of bytes, and the views that a reader keeps."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from torchtitan_rl.weight_sync import copying
from torchtitan_rl.weight_sync.handle import Part, Slot, whole_tensors
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.shm import ShmBuffer, ShmReader
from torchtitan_rl.weight_sync.transport import make_publisher


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_byte_is_copied_once_and_no_other_is_touched(threads, monkeypatch):
    monkeypatch.setattr(copying, "_PIECE", 64)
    sizes = [1, 63, 64, 65, 128, 1000, 7]
    sources = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in sizes]
    target = torch.full((2 * sum(sizes),), 255, dtype=torch.uint8)
    starts = [2 * sum(sizes[:i]) for i in range(len(sizes))]
    copies = [
        (target[first : first + len(source)].numpy(), source.numpy())
        for first, source in zip(starts, sources, strict=True)
    ]
    with ThreadPoolExecutor(threads) as pool:
        copying.copy(copies, pool, threads)
        copying.copy([], pool, threads)
    expected = [torch.cat([s, torch.full((len(s),), 255, dtype=torch.uint8)]) for s in sources]
    assert torch.equal(target, torch.cat(expected))


def test_only_memory_that_can_be_taken_as_it_is_is_taken():
    tensor = torch.arange(6.0).view(2, 3)
    taken = copying.bytes_of(tensor[1], torch.float32)
    assert taken.tobytes() == tensor[1].numpy().tobytes()
    tensor[1, 2] = 7.0
    assert taken.tobytes() == tensor[1].numpy().tobytes()  # it is the same memory
    assert copying.bytes_of(tensor.t(), torch.float32) is None
    assert copying.bytes_of(tensor, torch.bfloat16) is None
    assert copying.bytes_of(tensor.to("meta"), torch.float32) is None


@pytest.mark.parametrize("tensor", [torch.tensor(2.5), torch.empty(0, 3), torch.ones(3).bfloat16()])
def test_memory_of_any_kind_is_taken(tensor):
    taken = copying.bytes_of(tensor, tensor.dtype)
    assert len(taken) == tensor.numel() * tensor.itemsize
    assert copying.same(taken, taken.copy())


def test_weights_of_more_than_one_piece_are_published_by_several_threads():
    publisher = make_publisher("shm", checksums=False, threads=3)
    named = [("large", torch.randn(5_000_001)), ("small", torch.randn(3))]
    for version in range(3):
        named[0][1][-1] = version
        with open_snapshot(publisher.publish(whole_tensors(named), version)) as snapshot:
            assert all(torch.equal(dict(named)[name], t) for name, t in snapshot.tensors())
    publisher.close()


def test_who_reshapes_what_it_was_given_does_not_reshape_what_the_next_one_gets():
    publisher = make_publisher("shm")
    handle = publisher.publish(whole_tensors([("w", torch.ones(2, 3))]), 0)
    for _ in range(2):
        with open_snapshot(handle) as snapshot:
            [(_, tensor)] = snapshot.tensors()
            assert tensor.shape == (2, 3)
            tensor.t_()
    publisher.close()


def test_a_buffer_that_holds_another_layout_is_read_by_that():
    buffer = ShmBuffer(16)
    for number, (shape, dtype) in enumerate([((4,), torch.float32), ((4, 2), torch.bfloat16)]):
        buffer.reopen()
        written = torch.randn(shape).to(dtype)
        buffer.data.copy_(written.reshape(-1).view(torch.uint8))
        slot = Slot("w", shape, (0,) * len(shape), shape, dtype, 0, 16)
        reader = ShmReader(Part(0, number, buffer.seal(number, 0, [slot]), (slot,), (1,)), 0)
        assert torch.equal(reader.tensor_of(0), written)
        reader.close()
    buffer.close()
