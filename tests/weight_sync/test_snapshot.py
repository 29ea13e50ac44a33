"""Snapshots in shared memory and in files: whole, versioned, and as they were published."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from torchtitan_rl.weight_sync import shm
from torchtitan_rl.weight_sync.handle import (
    Shard,
    StaleHandleError,
    WeightSyncError,
    WrongWeightsError,
    merge_handles,
    whole_tensors,
)
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.transport import make_publisher

ROOT = Path(__file__).parents[2]

READER = """
import pickle, sys
from torchtitan_rl.weight_sync.reading import open_snapshot
handle = pickle.load(sys.stdin.buffer)
with open_snapshot(handle) as snapshot:
    snapshot.verify()
    pickle.dump({name: t.clone() for name, t in snapshot.tensors()}, sys.stdout.buffer)
"""


@pytest.fixture(params=["shm", "file", "collective"])
def transport(request):
    return request.param


@pytest.fixture
def publisher(transport, tmp_path):
    publisher = make_publisher(transport, folder=tmp_path / "weights", threads=2)
    yield publisher
    publisher.close()
    assert not list(tmp_path.glob("weights*"))


def weights(value, size=50_000):
    return [("w", torch.full((size,), float(value))), ("b", torch.full((3,), float(value)))]


def publish(publisher, named, version, **options):
    return publisher.publish(whole_tensors(named), version, **options)


def read(handle):
    with open_snapshot(handle) as snapshot:
        snapshot.verify(threads=2)
        return {name: tensor.clone() for name, tensor in snapshot.tensors()}


def assert_holds(handle, value, size=50_000):
    for name, expected in weights(value, size):
        assert torch.equal(read(handle)[name], expected)


def read_elsewhere(handle):
    run = subprocess.run(
        [sys.executable, "-c", READER], input=pickle.dumps(handle), capture_output=True, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr.decode()
    return pickle.loads(run.stdout)


def test_tensors_of_any_kind_are_read_as_they_were_written(publisher):
    named = [
        ("odd", torch.tensor([float("nan"), float("inf"), -0.0])),
        ("byte", torch.tensor([7], dtype=torch.uint8)),
        ("transposed", torch.arange(6.0).view(2, 3).t()),
        ("parameter", torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))),
        ("scalar", torch.tensor(2.5, dtype=torch.float64)),
        ("empty", torch.empty(0)),
    ]
    for version in range(3):
        fetched = read(publish(publisher, named, version))
        assert list(fetched) == [name for name, _ in named]
        for name, written in named:
            written = written.detach()
            torch.testing.assert_close(fetched[name], written, rtol=0, atol=0, equal_nan=True)
            assert fetched[name].dtype == written.dtype


def test_a_snapshot_without_a_tensor(publisher):
    assert read(publish(publisher, [], version=0)) == {}


def test_weights_are_cast_to_what_the_generator_computes_in(publisher):
    exact = torch.randn(100, 7)
    fetched = read(publish(publisher, [("w", exact)], version=0, dtype=torch.bfloat16))
    assert torch.equal(fetched["w"], exact.bfloat16())


def test_a_handle_is_small_and_knows_its_version_and_size(publisher):
    handle = pickle.loads(pickle.dumps(publish(publisher, weights(1), version=7)))
    assert handle.version == 7
    assert handle.nbytes == 4 * 50_003
    assert len(pickle.dumps(handle)) < 2_000
    assert_holds(handle, 1)


def test_a_version_before_the_first_is_refused(publisher):
    with pytest.raises(ValueError, match="start at 0, got -1"):
        publish(publisher, weights(1), version=-1)


def test_the_live_weights_may_change_once_they_are_copied(publisher):
    named = weights(1)

    def change():
        for _, tensor in named:
            tensor.add_(1)

    assert_holds(publish(publisher, named, version=0, copied=change), 1)


def test_a_snapshot_outlives_the_next_one_but_not_the_one_after(publisher):
    handles = [publish(publisher, weights(10), version=0)]
    for version in range(1, 5):
        handles.append(publish(publisher, weights(10 + version), version))
        assert_holds(handles[version - 1], 10 + version - 1)
        assert_holds(handles[version], 10 + version)
        for old in handles[: version - 1]:
            with pytest.raises(StaleHandleError, match=f"policy version {old.version}"):
                open_snapshot(old)


def test_versions_may_be_skipped(publisher):
    publish(publisher, weights(0), version=0)
    assert_holds(publish(publisher, weights(1), version=7), 1)


def test_tensors_may_grow_and_shrink(publisher):
    first = publish(publisher, weights(0, size=10), version=0)
    second = publish(publisher, weights(1, size=10), version=1)
    grown = publish(publisher, weights(2, size=90_000), version=2)
    assert_holds(second, 1, size=10)
    assert_holds(grown, 2, size=90_000)
    with pytest.raises(WeightSyncError):
        open_snapshot(first)
    publish(publisher, weights(3, size=90_000), version=3)
    assert_holds(publish(publisher, weights(4, size=10), version=4), 4, size=10)


def test_another_process_reads_the_same_values(publisher):
    torch.manual_seed(0)
    named = [("w", torch.randn(300, 70)), ("h", torch.randn(9).bfloat16()), ("s", torch.tensor(3))]
    fetched = read_elsewhere(publish(publisher, named, version=1))
    assert list(fetched) == ["w", "h", "s"]
    for name, tensor in named:
        assert torch.equal(fetched[name], tensor)


def boxes(tensor, cuts):
    """A matrix in as many parts as there are boxes, each in two pieces of rows where it can be."""
    rows, columns = cuts
    edges = [0, *rows, tensor.shape[0]], [0, *columns, tensor.shape[1]]
    for top, bottom in zip(edges[0], edges[0][1:], strict=False):
        for left, right in zip(edges[1], edges[1][1:], strict=False):
            box, half = tensor[top:bottom, left:right], (bottom - top) // 2
            pieces = (box[:half], box[half:]) if half else (box,)
            yield Shard("w", tuple(tensor.shape), (top, left), pieces)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(2, 9),
    columns=st.integers(2, 9),
    data=st.data(),
    dtype=st.sampled_from([None, torch.bfloat16]),
)
def test_boxes_of_any_cut_become_the_tensor_again(rows, columns, data, dtype):
    tensor = torch.randn(rows, columns)
    cuts = [sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=3))) for n in (rows, columns)]
    ranks = [make_publisher("shm") for _ in boxes(tensor, cuts)]
    handles = [
        rank.publish([shard], 0, dtype=dtype)
        for rank, shard in zip(ranks, boxes(tensor, cuts), strict=True)
    ]
    try:
        merged = merge_handles(handles)
        assert torch.equal(read(merged)["w"], tensor.to(dtype or tensor.dtype))
        for lacking in range(len(handles) if len(handles) > 1 else 0):
            with pytest.raises(WrongWeightsError, match="'w' has"):
                merge_handles([h for i, h in enumerate(handles) if i != lacking])
    finally:
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("damaged", [0, 1, 199_999])
def test_bytes_that_are_not_what_was_published_are_named(publisher, transport, damaged):
    handle = publish(publisher, weights(1), version=3)
    if transport != "file":
        publisher._newer.buffer.data[damaged] ^= 1
    else:
        file = Path(handle.parts[0].location.path)
        written = bytearray(file.read_bytes())
        # The last tensor of the file is the large one: safetensors sorts them.
        written[len(written) - 200_000 + damaged] ^= 1
        file.write_bytes(written)
    with (
        open_snapshot(handle) as snapshot,
        pytest.raises(WrongWeightsError, match="version 3: the bytes of w are not those"),
    ):
        snapshot.verify()


def test_an_old_buffer_that_is_being_read_is_left_to_its_reader():
    publisher = make_publisher("shm")
    first = publish(publisher, weights(1), version=1)
    with open_snapshot(first) as reading:
        tensors = dict(reading.tensors())
        for version in range(2, 6):
            assert_holds(publish(publisher, weights(version), version), version)
        publisher.close()
        reading.verify()
        assert torch.equal(tensors["w"], torch.full((50_000,), 1.0))
    with pytest.raises(WeightSyncError):
        open_snapshot(first)


def test_what_did_not_change_is_neither_copied_nor_hashed_again(publisher):
    frozen, trained = torch.ones(10_000), torch.zeros(10_000)
    named = [("frozen", frozen), ("trained", trained)]
    handles = []
    for version in range(4):
        trained += 1
        handles.append(publish(publisher, named, version))
    assert handles[-1].parts[0].changed == (1, 4)
    assert handles[-1].changed_bytes == trained.numel() * 4
    assert handles[-1].changed_since(handles[0]) == {"trained"}
    # Where the next one goes, a mark stays if nobody writes over it.
    older = publisher._older
    [offset] = [slot.offset for slot in older.layout.slots if slot.name == "frozen"]
    older.buffer.data[offset] ^= 1
    marked = publish(publisher, named, version=4)
    assert older.buffer.data[offset] != frozen[:1].view(torch.uint8)[0]
    assert marked.parts[0].checksums[0] == handles[0].parts[0].checksums[0]


def test_a_file_is_a_safetensors_file(tmp_path):
    publisher = make_publisher("file", folder=tmp_path / "weights")
    handle = publish(publisher, weights(4), version=2)
    [file] = tmp_path.glob("weights-*/*")
    assert str(file) == handle.parts[0].location.path
    assert torch.equal(load_file(file)["w"], torch.full((50_000,), 4.0))
    publisher.close()


def test_files_of_old_versions_are_removed_and_a_broken_one_is_named(tmp_path):
    publisher = make_publisher("file", folder=tmp_path / "weights")
    handles = [publish(publisher, weights(v), version=v) for v in range(5)]
    files = sorted(file.name for file in tmp_path.glob("weights-*/*"))
    assert files == ["4-version-3.safetensors", "5-version-4.safetensors"]
    Path(handles[4].parts[0].location.path).write_bytes(b"not a safetensors file")
    with pytest.raises(WeightSyncError, match=r"cannot read the weights in .*version-4"):
        open_snapshot(handles[4])
    os.replace(handles[3].parts[0].location.path, handles[4].parts[0].location.path)
    with pytest.raises(StaleHandleError, match="holds policy version 3, not 4"):
        open_snapshot(handles[4])
    publisher.close()


@pytest.mark.parametrize("content", [b"", b"x" * 10, b"x" * 1_000_000], ids=len)
def test_another_file_under_the_same_descriptor_does_not_pass_for_the_weights(tmp_path, content):
    (tmp_path / "other").write_bytes(content)
    with (tmp_path / "other").open("rb") as other:
        publisher = make_publisher("shm")
        handle = publish(publisher, weights(5), version=0)
        publisher.close()
        descriptor = handle.parts[0].location.fd
        os.dup2(other.fileno(), descriptor)
        try:
            with pytest.raises(WeightSyncError):
                open_snapshot(handle)
        finally:
            os.close(descriptor)


def test_close_frees_the_buffers():
    publisher = make_publisher("shm")
    handles = [publish(publisher, weights(v), version=v) for v in range(2)]
    publisher.close()
    for handle in handles:
        assert not Path(f"/proc/self/fd/{handle.parts[0].location.fd}").exists()
    publisher.close()


def test_the_same_version_published_again_with_other_weights_is_another_snapshot(publisher):
    first = publish(publisher, weights(1), version=3)
    second = publish(publisher, weights(2), version=3)
    assert second.changed_since(first) == {"w", "b"}
    third = publish(publisher, weights(3), version=3)
    assert_holds(second, 2)
    assert_holds(third, 3)
    with pytest.raises(StaleHandleError, match="policy version 3"):
        open_snapshot(first)
    after = publish(publisher, weights(2), version=4)
    assert after.changed_since(third) == {"w", "b"}
    assert_holds(after, 2)


def test_a_folder_that_cannot_be_made_is_an_error_that_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("no folder")
    publisher = make_publisher("file", folder=tmp_path / "file" / "weights")
    with pytest.raises(WeightSyncError, match=r"file/weights.*trainer\.weight_sync\.folder"):
        publish(publisher, weights(1), version=0)
    publisher.close()


def test_two_runs_may_have_the_same_folder(tmp_path):
    one, other = (make_publisher("file", folder=tmp_path / "weights") for _ in range(2))
    handles = [publish(p, weights(v), version=7) for v, p in enumerate((one, other))]
    other.close()
    assert_holds(handles[0], 0)
    one.close()


def test_every_rank_keeps_its_mappings_warm():
    others = set(shm._mappings)
    ranks = [make_publisher("shm") for _ in range(6)]
    for version in range(2, 4):
        for rank in ranks:
            read(publish(rank, weights(version), version))
    known = set(shm._mappings)
    for rank in ranks:
        read(publish(rank, weights(9), version=9))
    assert set(shm._mappings) == known
    for rank in ranks:
        rank.close()
    late = make_publisher("shm")
    read(publish(late, weights(1), version=0))
    assert not (known - others) & set(shm._mappings)  # nobody keeps the memory of what was given up
    late.close()
