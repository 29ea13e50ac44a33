"""One process publishes, several read: real actors, the same tests for every transport."""

import asyncio
from dataclasses import replace

import psutil
import pytest
import torch
from monarch.actor import ActorError

from tests.weight_sync.actors import Reader, Writer, values
from torchtitan_rl.config import WeightSyncConfig
from torchtitan_rl.platform import worker_env
from torchtitan_rl.supervision.spawn import spawn
from torchtitan_rl.weight_sync.handle import Part, Slot
from torchtitan_rl.weight_sync.rdma import _changed_blocks
from torchtitan_rl.weight_sync.transport import (
    Ends,
    check_folder,
    choose_transport,
    wants_checksums,
)

SIZE = 2_500_000  # 25 MB: more than one block of RDMA


async def start(actor, *arguments):
    spawned = await spawn(actor, *arguments, env=worker_env(1, role="grader"))
    await spawned.actor.open.call_one()
    return spawned


@pytest.fixture(scope="module", params=["rdma", "shm", "file", "collective"])
async def transport(request):
    return request.param


@pytest.fixture(scope="module")
async def writer(transport, tmp_path_factory):
    folder = tmp_path_factory.mktemp(transport) / "weights"
    spawned = await start(Writer, transport, str(folder), SIZE)
    yield spawned.actor
    await spawned.stop()


@pytest.fixture(scope="module")
async def second_writer(transport, tmp_path_factory):
    """Another rank's, which the last test kills; and the folder of its files."""
    folder = tmp_path_factory.mktemp(f"second-{transport}")
    spawned = await start(Writer, transport, str(folder / "weights"), SIZE)
    yield spawned, folder
    await spawned.stop()


@pytest.fixture(scope="module")
async def readers():
    spawned = await asyncio.gather(start(Reader), start(Reader))
    yield [s.actor for s in spawned]
    await asyncio.gather(*(s.stop() for s in spawned))


def assert_equal(read, seed):
    expected = values(seed, SIZE)
    assert list(read) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor), name


async def test_several_readers_of_one_snapshot(writer, readers, transport):
    for version in range(3):
        handle = await writer.publish.call_one(version, version)
        assert handle.transport == transport
        assert len(handle.parts[0].checksums) == len(handle.slots)
        for read in await asyncio.gather(*(r.read.call_one(handle) for r in readers)):
            assert_equal(read, version)


async def test_an_older_snapshot_can_be_read_and_then_a_newer_one_again(writer, readers):
    first = await writer.publish.call_one(10, 10)
    second = await writer.publish.call_one(11, 11)
    for handle in (second, first, second):
        assert_equal(await readers[0].read.call_one(handle), handle.version)


async def test_an_overwritten_snapshot_is_refused_by_version(writer, readers):
    handles = [await writer.publish.call_one(v, v) for v in (20, 21, 22)]
    with pytest.raises(ActorError, match="StaleHandleError: policy version 20"):
        await readers[0].read.call_one(handles[0])
    assert_equal(await readers[0].read.call_one(handles[1]), 21)
    assert_equal(await readers[0].read.call_one(handles[2]), 22)


async def test_damaged_bytes_are_refused_by_name(writer, readers):
    handle = await writer.publish.call_one(30, 30)
    await writer.damage.call_one(handle)
    for reader in readers:
        with pytest.raises(ActorError, match="the bytes of w are not those"):
            await reader.read.call_one(handle)
    for version in (31, 32):  # what follows is whole again
        handle = await writer.publish.call_one(version, version)
        assert_equal(await readers[0].read.call_one(handle), version)


async def test_a_reader_outlives_ranks_of_which_one_is_ahead(writer, second_writer, readers):
    second, _ = second_writer

    async def publish(actor, versions):
        return [await actor.publish.call_one(version, version) for version in versions]

    async def ranks(versions):
        """A handle as of two ranks that have half of the tensors each."""
        one, two = await asyncio.gather(publish(writer, (40, 41)), publish(second.actor, versions))
        return replace(one[-1], parts=(*one[-1].parts, *two[0].parts))

    with pytest.raises(ActorError, match="StaleHandleError: policy version 41"):
        await readers[0].read.call_one(await ranks((41, 42, 43)))
    [handle] = await publish(writer, (44,))
    assert_equal(await readers[0].read.call_one(handle), 44)


@pytest.mark.parametrize(
    ("held", "blocks"),
    [(-1, {0, 1, 2, 3}), (0, {0, 1, 2, 3}), (1, {1, 3}), (2, {3}), (3, set())],
)
def test_only_blocks_in_which_something_changed_are_read(held, blocks):
    mb = 1 << 20
    bounds = [(0, 17, 1), (17, 2, 2), (19, 30, 1), (49, 14, 3)]  # first megabyte, how many, changed
    slots = tuple(
        Slot(str(first), (1,), (0,), (1,), torch.uint8, first * mb, count * mb)
        for first, count, _ in bounds
    )
    part = Part(0, 3, None, slots, tuple(changed for *_, changed in bounds))
    assert _changed_blocks(part, held) == blocks


async def test_a_writer_that_is_gone_is_an_error_and_not_a_wait(second_writer, readers):
    spawned, folder = second_writer
    handle = await spawned.actor.publish.call_one(50, 50)
    for process in spawned.processes:
        process.kill()
    psutil.wait_procs(spawned.processes, timeout=10)
    async with asyncio.timeout(20):  # until the files' janitor has noticed
        while list(folder.glob("weights*")):
            await asyncio.sleep(0.05)
    with pytest.raises(ActorError, match=r"WeightSyncError|StaleHandleError|LinkError"):
        await readers[1].read.call_one(handle)


ONE, TWO = frozenset({"a"}), frozenset({"a", "b"})
CPU, GPUS = Ends(hosts=ONE), Ends(hosts=ONE, device="cuda", trainer_ranks=4)


@pytest.mark.parametrize(
    ("asked", "ends", "chosen", "said"),
    [
        ("auto", CPU, "shm", "one host, without GPUs"),
        ("auto", Ends(hosts=TWO), "relay", "over TCP: each of the 2 hosts has one"),
        ("rdma", Ends(hosts=TWO), "rdma", "TCP: there is no RDMA card"),
        ("auto", GPUS, "collective", "by NCCL: each generator receives all of them from 4 trainer"),
        ("auto", replace(GPUS, hosts=TWO), "relay", "from host to host over TCP"),
        ("auto", replace(GPUS, tensor_parallel=2), "collective", "receives its slice of them"),
        ("auto", replace(GPUS, shared_gpus=1), "shm", "would keep two snapshots"),
        ("shm", CPU, "shm", "one host"),
        ("shm", GPUS, "shm", "transport says so; collective goes from"),
        ("rdma", CPU, "rdma", "warning: weights go over TCP"),
        ("relay", CPU, "relay", "through shared memory: all actors are on one host"),
        ("file", Ends(hosts=TWO), "file", "through files"),
        ("collective", CPU, "collective", "by gloo: each generator receives all of them from 1"),
    ],
)
def test_the_transport_is_chosen_and_said(asked, ends, chosen, said):
    transport, why = choose_transport(WeightSyncConfig(transport=asked), ends)
    assert transport == chosen
    assert said in why


@pytest.mark.parametrize(
    ("transport", "device", "checked"),
    [
        ("shm", "cpu", False),
        ("file", "cuda", True),
        ("relay", "cpu", True),
        ("relay", "cuda", True),
        *((transport, "cpu", True) for transport in ("rdma", "collective")),
        *((transport, "cuda", False) for transport in ("rdma", "collective")),
    ],
)
def test_by_default_bytes_that_a_cpu_sends_or_files_keep_have_checksums(transport, device, checked):
    assert wants_checksums(WeightSyncConfig(), transport, device) == checked


@pytest.mark.parametrize("transport", ["auto", "shm", "relay", "rdma", "collective"])
def test_a_folder_is_refused_where_no_files_are_written(transport):
    with pytest.raises(ValueError, match=rf"folder is 'w', .*transport is {transport}.* to file"):
        WeightSyncConfig(transport=transport, folder="w")


@pytest.mark.parametrize(
    ("folder", "culprit", "why"),
    [
        ("file", "file", "Not a directory"),
        ("file/below", "file", "Not a directory"),
        ("file/far/below", "file", "Not a directory"),
        ("/proc/weights", "/proc", "No such file"),
    ],
)
def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch, folder, culprit, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^trainer\.weight_sync\.folder is") as refused:
        check_folder(WeightSyncConfig(transport="file", folder=folder))
    assert f"{tmp_path / culprit} cannot be written to ({why}" in str(refused.value)
    assert "leave it empty" in str(refused.value)


@pytest.mark.parametrize("folder", ["", ".", "here", "not/there/yet"])
def test_a_folder_that_can_be_made_is_not_made_yet(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    check_folder(WeightSyncConfig(transport="file", folder=folder))
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


@pytest.mark.parametrize("transport", ["shm", "collective"])
def test_what_does_not_reach_another_host_is_refused(transport):
    with pytest.raises(
        ValueError, match=f"is {transport}, .* 2 hosts: use relay, rdma, file or auto"
    ):
        choose_transport(WeightSyncConfig(transport=transport), Ends(hosts=TWO))
