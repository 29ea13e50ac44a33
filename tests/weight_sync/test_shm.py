"""Weight sync by shared memory: snapshots, two buffers in turn, and what late readers are told."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchtitan_rl.weight_sync.handle import (
    StaleHandleError,
    WeightSyncError,
    check_fresh,
    fetch,
    make_publisher,
)

ROOT = Path(__file__).parents[2]

READER = """
import pickle, sys
from torchtitan_rl.weight_sync.handle import fetch
handle = pickle.load(sys.stdin.buffer)
pickle.dump({name: t.clone() for name, t in fetch(handle)}, sys.stdout.buffer)
"""

WRITER = """
import pickle, sys, torch
from torchtitan_rl.weight_sync.handle import make_publisher
publisher = make_publisher("shm")
handle = publisher.publish([("w", torch.arange(50_000.0))], version=3)
pickle.dump(handle, sys.stdout.buffer)
sys.stdout.buffer.flush()
sys.stdin.read()
"""


@pytest.fixture
def publisher():
    publisher = make_publisher("shm")
    yield publisher
    publisher.close()


def weights(value, size=50_000):
    """Several pages, so that the header's page is not all there is."""
    return [("w", torch.full((size,), float(value))), ("b", torch.full((3,), float(value)))]


def assert_holds(handle, value, size=50_000):
    fetched = dict(fetch(handle))
    assert fetched.keys() == {"w", "b"}
    assert torch.equal(fetched["w"], torch.full((size,), float(value)))
    assert torch.equal(fetched["b"], torch.full((3,), float(value)))


def read_elsewhere(handle):
    """The snapshot as a process that has never seen the buffer reads it."""
    done = subprocess.run(
        [sys.executable, "-c", READER],
        input=pickle.dumps(handle),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        timeout=120,
        check=True,
    )
    return pickle.loads(done.stdout)


SHAPES = [(), (1,), (0,), (5,), (2, 3), (2, 0, 3), (3, 1, 2, 2)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
def test_round_trip_of_every_shape(publisher, dtype):
    torch.manual_seed(0)
    named = [(f"t{i}", (torch.randn(shape) * 3).to(dtype)) for i, shape in enumerate(SHAPES)]
    fetched = list(fetch(publisher.publish(named, version=0)))
    assert [name for name, _ in fetched] == [name for name, _ in named]
    for (_, read), (_, written) in zip(fetched, named, strict=True):
        torch.testing.assert_close(read, written, rtol=0, atol=0)


def test_round_trip_of_mixed_dtypes_views_gradients_and_odd_values(publisher):
    named = [
        ("odd", torch.tensor([float("nan"), float("inf"), -0.0])),
        ("byte", torch.tensor([7], dtype=torch.uint8)),
        ("transposed", torch.arange(6.0).view(2, 3).t()),
        ("parameter", torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))),
        ("scalar", torch.tensor(2.5, dtype=torch.float64)),
    ]
    for (_, read), (_, written) in zip(
        fetch(publisher.publish(named, version=0)), named, strict=True
    ):
        torch.testing.assert_close(read, written.detach(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("named", [[], [("empty", torch.empty(0))]])
def test_a_snapshot_without_a_byte(publisher, named):
    fetched = list(fetch(publisher.publish(named, version=0)))
    assert [(name, tuple(t.shape)) for name, t in fetched] == [(n, (0,)) for n, _ in named]


def test_a_handle_is_small_and_knows_its_version_and_size(publisher):
    handle = pickle.loads(pickle.dumps(publisher.publish(weights(1), version=7)))
    assert handle.version == 7
    assert handle.nbytes == 4 * 50_003
    assert len(pickle.dumps(handle)) < 2_000
    assert_holds(handle, 1)


def test_a_version_before_the_first_is_refused(publisher):
    with pytest.raises(ValueError, match="start at 0, got -1"):
        publisher.publish(weights(1), version=-1)


def test_the_snapshot_does_not_follow_the_live_weights(publisher):
    named = weights(1)
    handle = publisher.publish(named, version=0)
    for _, tensor in named:
        tensor.add_(1)
    assert_holds(handle, 1)


def test_a_snapshot_outlives_the_next_one_but_not_the_one_after(publisher):
    handles = [publisher.publish(weights(10), version=0)]
    for version in range(1, 5):
        handles.append(publisher.publish(weights(10 + version), version))
        assert_holds(handles[version - 1], 10 + version - 1)
        assert_holds(handles[version], 10 + version)
        for old in handles[: version - 1]:
            with pytest.raises(StaleHandleError, match=f"weights version {old.version} were over"):
                list(fetch(old))
            with pytest.raises(StaleHandleError):
                check_fresh(old)


@pytest.mark.parametrize("tensors_read", [1, 2])
def test_a_reader_overtaken_half_way_or_at_the_end_is_told(publisher, tensors_read):
    reading = fetch(publisher.publish(weights(0), version=0))
    for _ in range(tensors_read):
        next(reading)
    publisher.publish(weights(1), version=1)
    publisher.publish(weights(2), version=2)
    with pytest.raises(StaleHandleError, match=r"version 0 were overwritten.*holding version 2"):
        next(reading)


def test_tensors_may_grow_and_shrink(publisher):
    first = publisher.publish(weights(0, size=10), version=0)
    second = publisher.publish(weights(1, size=10), version=1)
    grown = publisher.publish(weights(2, size=90_000), version=2)
    assert_holds(second, 1, size=10)
    assert_holds(grown, 2, size=90_000)
    with pytest.raises(StaleHandleError):
        list(fetch(first))
    publisher.publish(weights(3, size=90_000), version=3)
    shrunk = publisher.publish(weights(4, size=10), version=4)
    assert_holds(shrunk, 4, size=10)


def test_another_process_reads_the_same_values(publisher):
    torch.manual_seed(0)
    named = [("w", torch.randn(300, 70)), ("h", torch.randn(9).bfloat16()), ("s", torch.tensor(3))]
    fetched = read_elsewhere(publisher.publish(named, version=1))
    assert list(fetched) == ["w", "h", "s"]
    for name, tensor in named:
        torch.testing.assert_close(fetched[name], tensor, rtol=0, atol=0)


def test_what_a_reader_does_to_its_views_reaches_no_other_reader(publisher):
    handle = publisher.publish(weights(1), version=0)
    for _, tensor in fetch(handle):
        tensor.fill_(99)
    elsewhere = read_elsewhere(handle)
    assert torch.equal(elsewhere["w"], torch.ones(50_000))
    assert torch.equal(elsewhere["b"], torch.ones(3))


def test_what_a_reader_does_to_its_views_does_not_hide_later_snapshots_from_it(publisher):
    # A private page that was written to no longer follows the file: quietly old weights.
    for _, tensor in fetch(publisher.publish(weights(0), version=0)):
        tensor[-1] = 99
    publisher.publish(weights(1), version=1)
    assert_holds(publisher.publish(weights(2), version=2), 2)


def test_a_killed_writer_leaves_nothing_and_new_readers_are_told():
    with subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as writer:
        try:
            handle = pickle.load(writer.stdout)
            fds = Path(f"/proc/{writer.pid}/fd")
            files = [os.readlink(fd) for fd in fds.iterdir()]
        finally:
            writer.kill()
    # The buffers have no name that could stay behind in a file system.
    assert any("memfd:torchtitan_rl_weights" in file for file in files)
    assert not any(file.startswith("/dev/shm") for file in files)
    with pytest.raises(WeightSyncError, match=f"process {writer.pid}.*the trainer alive"):
        list(fetch(handle))


def test_a_closed_publisher_is_reported_but_mapped_views_stay_readable():
    publisher = make_publisher("shm")
    handle = publisher.publish(weights(5), version=0)
    view = dict(fetch(handle))["w"]
    publisher.close()
    assert torch.equal(view, torch.full((50_000,), 5.0))
    with pytest.raises(StaleHandleError):
        list(fetch(handle))


def test_a_closed_publisher_is_reported_to_a_first_reader():
    publisher = make_publisher("shm")
    handle = publisher.publish(weights(5), version=0)
    publisher.close()
    with pytest.raises(WeightSyncError):
        list(fetch(handle))


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"x" * 1_000_000], ids=len)
def test_another_file_under_the_same_descriptor_does_not_pass_for_the_weights(tmp_path, content):
    (tmp_path / "other").write_bytes(content)
    with (tmp_path / "other").open("rb") as other:
        publisher = make_publisher("shm")
        handle = publisher.publish(weights(5), version=0)
        publisher.close()
        os.dup2(other.fileno(), handle.location.fd)
        try:
            with pytest.raises(WeightSyncError):
                list(fetch(handle))
        finally:
            os.close(handle.location.fd)


def test_close_frees_the_buffers_and_publishing_can_start_over():
    publisher = make_publisher("shm")
    handles = [publisher.publish(weights(v), version=v) for v in range(2)]
    publisher.close()
    for handle in handles:
        assert not Path(f"/proc/self/fd/{handle.location.fd}").exists()
    publisher.close()
    assert_holds(publisher.publish(weights(7), version=2), 7)
    publisher.close()
