"""Weights by process groups: what is sent to whom, and what becomes of the others when one end
dies, hangs, or asks for what is not there. Real gloo between real processes and threads."""

import pickle
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.weight_sync.test_faults import ROOT, start, wait_until
from torchtitan_rl.weight_sync import pair, receiving
from torchtitan_rl.weight_sync.boxes import Box, Piece, cut, lay_out, place, slot_tensor
from torchtitan_rl.weight_sync.collective import CollectiveBuffer, Offer, Server
from torchtitan_rl.weight_sync.control import Control
from torchtitan_rl.weight_sync.handle import (
    Part,
    Shard,
    StaleHandleError,
    WeightHandle,
    WrongWeightsError,
    merge_handles,
    whole_tensors,
)
from torchtitan_rl.weight_sync.pair import LinkError
from torchtitan_rl.weight_sync.plan import CopyPlan
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.receiving import Wanted
from torchtitan_rl.weight_sync.transport import make_publisher


@pytest.fixture
def publisher():
    publisher = make_publisher("collective")
    yield publisher
    publisher.close()


def publish(publisher, version, size=1000) -> WeightHandle:
    named = [("w", torch.full((size, 8), float(version))), ("b", torch.arange(8.0))]
    return publisher.publish(whole_tensors(named), version)


def assert_holds(handle, size=1000):
    with open_snapshot(handle) as snapshot:
        snapshot.verify()
        tensors = dict(snapshot.tensors())
        assert torch.equal(tensors["w"], torch.full((size, 8), float(handle.version)))
        assert torch.equal(tensors["b"], torch.arange(8.0))


def offers(publisher) -> dict:
    """What the publisher's readers may ask for."""
    return publisher._newer.buffer._server._offers


# ---- what is sent --------------------------------------------------------------------------------


@st.composite
def pieces_of_a_part(draw):
    """Tensors of a part, and boxes of some of them."""
    tensors, pieces = [], []
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]))
        tensors.append((str(number), torch.randint(0, 200, shape).to(dtype)))
        for _ in range(draw(st.integers(0, 2))):
            start = tuple(draw(st.integers(0, size)) for size in shape)
            ends = zip(shape, start, strict=True)
            inside = tuple(draw(st.integers(0, size - first)) for size, first in ends)
            pieces.append(Piece(number, Box(start, inside)))
    return tensors, pieces


@settings(max_examples=100, deadline=None)
@given(pieces_of_a_part(), st.sampled_from([1, 100, 1 << 20]))
def test_both_ends_make_the_same_of_any_pieces(part, most):
    tensors, pieces = part
    shards = whole_tensors(tensors)
    plan = CopyPlan(shards, None, None)
    data = torch.zeros(plan.layout.nbytes, dtype=torch.uint8)
    for view, row in zip(plan.layout.cut(data), plan.rows, strict=True):
        view.copy_(row)
    offer = Offer(data, 1, 0, plan.layout.slots)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchtitan_rl.weight_sync.boxes.MESSAGE", most)
        sent = list(offer.memory(pieces))
        messages = lay_out(offer.slots, pieces)
        starts, nbytes = place(messages)
    assert [len(message) for message in sent] == [message.nbytes for message in messages]
    received = torch.full((nbytes,), 255, dtype=torch.uint8)
    for first, message in zip(starts, sent, strict=True):
        received[first : first + len(message)] = message
    part = Part(0, 1, None, tuple(offer.slots), (1,) * len(offer.slots))
    slots = receiving._slots_of(part, pieces, messages, starts)
    for piece, slot in zip(pieces, slots, strict=True):
        name, tensor = tensors[piece.slot]
        assert slot.name == name
        expected = cut(tensor, Box((0,) * tensor.ndim, tuple(tensor.shape)), piece.box)
        assert torch.equal(slot_tensor(received, slot), expected)


def halves(tensor: torch.Tensor, dim: int, name="w") -> list[Shard]:
    """A tensor as two ranks have it."""
    size = tensor.shape[dim] // 2
    starts = [tuple(rank * size if d == dim else 0 for d in range(tensor.ndim)) for rank in (0, 1)]
    return [
        Shard(name, tuple(tensor.shape), start, (piece,))
        for start, piece in zip(starts, tensor.chunk(2, dim), strict=True)
    ]


@pytest.mark.parametrize("sharded", [0, 1], ids=["rows", "columns"])
@pytest.mark.parametrize("wanted", [0, 1], ids=["rows", "columns"])
def test_a_reader_of_slices_is_sent_these_and_nothing_else(sharded, wanted):
    tensor = torch.randn(64, 128)
    ranks = [make_publisher("collective") for _ in range(2)]
    shards = halves(tensor, sharded)
    parts = [rank.publish([shard], 0) for rank, shard in zip(ranks, shards, strict=True)]
    handle = merge_handles(parts)
    for slice_ in halves(tensor, wanted):
        box = Box(slice_.start, tuple(slice_.rows[0].shape))
        with open_snapshot(handle, Wanted(boxes={"w": [box]})) as snapshot:
            snapshot.verify()
            assert torch.equal(snapshot.box("w", box), slice_.rows[0])
            assert snapshot.received == tensor.nbytes // 2
    for rank in ranks:
        rank.close()


def test_only_tensors_that_changed_are_sent(publisher):
    served, handle = publish(publisher, 1), publish(publisher, 2)
    names = frozenset(handle.changed_since(served))
    assert names == {"w"}
    with open_snapshot(handle, Wanted(names)) as snapshot:
        assert dict(snapshot.tensors(set(names)))["w"][0, 0] == 2
        assert snapshot.received == 1000 * 8 * 4


@pytest.mark.parametrize("slot", [0, 1])
def test_a_slice_of_damaged_bytes_is_refused_by_name(publisher, slot):
    handle = publish(publisher, 1)
    name = handle.slots[slot].name
    publisher._newer.buffer.data[handle.slots[slot].offset] ^= 1
    whole = handle.slots[slot].whole
    elsewhere = Box((0,) * (len(whole) - 1) + (4,), (*whole[:-1], 4))
    with pytest.raises(WrongWeightsError, match=f"version 1: the bytes of {name} are not those"):
        open_snapshot(handle, Wanted(boxes={name: [elsewhere]}))


def test_a_slice_that_was_damaged_on_its_way_is_refused_by_name(publisher, monkeypatch):
    handle = publish(publisher, 1)
    sent = Offer.memory

    def damaged(self, pieces):
        for data in sent(self, pieces):
            data = data.clone()
            data[3] ^= 1
            yield data

    monkeypatch.setattr(Offer, "memory", damaged)
    box = Box((10, 0), (20, 8))
    with (
        open_snapshot(handle, Wanted(boxes={"w": [box]})) as snapshot,
        pytest.raises(WrongWeightsError, match="the bytes of w are not those"),
    ):
        snapshot.verify()


READER = """
import pickle, sys
from torchtitan_rl.weight_sync.reading import open_snapshot
while True:
    handle = pickle.load(sys.stdin.buffer)
    with open_snapshot(handle) as snapshot:
        snapshot.verify()
        read = {name: t.clone() for name, t in snapshot.tensors()}
    pickle.dump((snapshot.received, read), sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""


def test_readers_on_one_host_are_sent_one_copy(publisher):
    readers = [start(READER) for _ in range(2)]

    def read(reader, handle):
        pickle.dump(handle, reader.stdin)
        reader.stdin.flush()
        return pickle.load(reader.stdout)

    try:
        with ThreadPoolExecutor(2) as pool:
            for version in range(3):
                handle = publish(publisher, version)
                found = list(pool.map(read, readers, [handle] * 2))
                for _, tensors in found:
                    assert torch.equal(tensors["w"], torch.full((1000, 8), float(version)))
                assert sorted(received for received, _ in found) == [0, handle.nbytes]
            # Who has received it dies, and its memory with it: the next one gets its own.
            [first] = [r for r, (n, _) in zip(readers, found, strict=True) if n]
            first.kill()
            first.wait()
            readers.append(start(READER))
            received, tensors = read(readers[-1], handle)
            assert received == handle.nbytes
            assert torch.equal(tensors["w"], torch.full((1000, 8), 2.0))
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()


# ---- what goes wrong -----------------------------------------------------------------------------

DYING_READER = """
import pickle, sys, time
from torchtitan_rl.weight_sync import receiving
from torchtitan_rl.weight_sync.reading import open_snapshot

def stop_there(*_, **__):
    print("asked", flush=True)
    time.sleep(600)

receiving.transfer = stop_there
open_snapshot(pickle.load(sys.stdin.buffer))
"""


def test_a_reader_that_dies_as_it_is_sent_weights_gives_its_buffer_back(publisher):
    size = 100_000
    handle = publish(publisher, 1, size)
    with start(DYING_READER) as reader:
        pickle.dump(handle, reader.stdin)
        reader.stdin.flush()
        assert reader.stdout.readline() == b"asked\n"
        [offer] = offers(publisher).values()
        assert offer.readers == 1
        second = publish(publisher, 2, size)
        third = publish(publisher, 3, size)  # into a new buffer: the first is being read
        assert_holds(second, size)
        reader.send_signal(signal.SIGKILL)
    wait_until(lambda: not offer.readers)
    assert_holds(third, size)
    with pytest.raises(StaleHandleError, match="policy version 1"):
        open_snapshot(handle)


def impatient(seconds=2.0):
    """A publisher that does not wait long."""
    server = Server(torch.device("cpu"), seconds=seconds)
    publisher = make_publisher("collective")
    publisher._make_buffer = lambda n: CollectiveBuffer(n, server, torch.device("cpu"))
    publisher._at_close = server.close
    return publisher


def test_a_reader_that_hangs_is_given_up(monkeypatch):
    publisher, size = impatient(), 100_000
    handle = publish(publisher, 1, size)
    asked, going_on = threading.Event(), threading.Event()

    def hang(*_, **__):
        asked.set()
        assert going_on.wait(20)
        raise LinkError("it hung")

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(receiving, "transfer", hang)
        reading = pool.submit(open_snapshot, handle)
        assert asked.wait(20)
        [offer] = offers(publisher).values()
        wait_until(lambda: not offer.readers)
        patch.undo()  # from now on it receives what it is sent
        going_on.set()
        with reading.result() as snapshot:  # by a new group
            assert dict(snapshot.tensors())["w"][0, 0] == 1
    publisher.close()


HANGING_WRITER = """
import pickle, sys, time, torch
from torchtitan_rl.weight_sync import collective
from torchtitan_rl.weight_sync.handle import whole_tensors
from torchtitan_rl.weight_sync.transport import make_publisher

def stop_there(*_, **__):
    print("sending", file=sys.stderr, flush=True)
    time.sleep(600)

collective.transfer = stop_there
publisher = make_publisher("collective")
handle = publisher.publish(whole_tensors([("w", torch.ones(1000))]), version=1)
pickle.dump(handle, sys.stdout.buffer)
sys.stdout.buffer.flush()
sys.stdin.read()
"""


@pytest.mark.parametrize("ending", ["killed", "hangs"])
def test_a_trainer_that_ends_as_it_sends_weights_is_an_error(monkeypatch, ending):
    command = [sys.executable, "-c", HANGING_WRITER]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with (
        subprocess.Popen(command, cwd=ROOT, **pipes) as writer,
        ThreadPoolExecutor(1) as pool,
    ):
        try:
            handle = pickle.load(writer.stdout)
            if ending == "hangs":
                monkeypatch.setattr(receiving, "SECONDS", 1.0)
            reading = pool.submit(open_snapshot, handle)
            while b"sending" not in (line := writer.stderr.readline()):
                assert line, "the writer has ended"
            if ending == "killed":
                writer.kill()
            with pytest.raises(LinkError, match=r"policy version 1 could .* the trainer alive\?"):
                reading.result()
        finally:
            writer.kill()
    assert not [key for key in receiving._links if key[1] == handle.parts[0].location.port]


def test_a_trainer_that_says_nothing_is_an_error(publisher, monkeypatch):
    handle = publish(publisher, 1)
    monkeypatch.setattr(receiving, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        location = handle.parts[0].location
        object.__setattr__(location, "port", silent.getsockname()[1])
        with pytest.raises(LinkError, match=r"version 1 .* sends no message: timed out"):
            open_snapshot(handle)


def test_a_broken_link_is_made_anew(publisher):
    assert_holds(publish(publisher, 1))
    [link] = [
        link
        for (_, port, _), link in receiving._links.items()
        if port == publisher._newer.buffer._server.location.port
    ]
    server = publisher._newer.buffer._server
    for control in list(server._links):
        control.close()
    handle = publish(publisher, 2)
    assert_holds(handle)
    assert link not in receiving._links.values()


def test_who_does_not_know_the_handle_gets_nothing(publisher):
    location = publish(publisher, 1).parts[0].location
    with socket.create_connection((location.address, location.port)) as connection:
        control = Control(connection, 20)
        control.send(token="guessed")
        with pytest.raises(LinkError, match="has gone"):
            control.receive()


def test_nobody_listens_on_other_addresses():
    before = {c.laddr for c in listening()}
    other = make_publisher("collective")
    assert_holds(publish(other, 1))
    opened = {c.laddr for c in listening()} - before
    other.close()
    assert {address.ip for address in opened} == {"127.0.0.1"}


def listening():
    connections = psutil.Process().net_connections("tcp")
    return [c for c in connections if c.status == psutil.CONN_LISTEN]


def test_slots_of_other_sizes_are_an_error_and_the_rank_goes_on(publisher):
    handle = publish(publisher, 1)
    part = handle.parts[0]
    slots = part.slots
    right = slots[0]
    for wrong in (
        right._replace(whole=(9000, 8), shape=(9000, 8), nbytes=9000 * 32),
        right._replace(whole=(1000,), shape=(1000,), start=(0,), nbytes=4000),
        right._replace(dtype=torch.float64, nbytes=2 * right.nbytes),
        right._replace(offset=64),
    ):
        object.__setattr__(part, "slots", (wrong, slots[1]))
        with pytest.raises(WrongWeightsError, match=r"version 1: .* disagree on the sizes"):
            open_snapshot(handle)
    assert_holds(publish(publisher, 2))


def test_a_closed_publisher_leaves_no_thread_and_no_socket(publisher):
    before = set(threading.enumerate())
    other = make_publisher("collective")
    handle = publish(other, 1)
    assert_holds(handle)
    started = set(threading.enumerate()) - before
    assert [thread for thread in started if thread.name == "weights"]
    other.close()
    wait_until(lambda: not any(thread.is_alive() for thread in started))
    with pytest.raises(LinkError, match="cannot reach the trainer"):
        open_snapshot(handle)


LEAVING = """
import torch
from torchtitan_rl.weight_sync.handle import whole_tensors
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.transport import make_publisher
publisher = make_publisher("collective")
snapshot = open_snapshot(publisher.publish(whole_tensors([("w", torch.ones(3))]), version=1))
print(dict(snapshot.tensors())["w"].tolist())
"""


def test_a_process_that_closes_nothing_ends_all_the_same():
    with start(LEAVING) as process:
        assert process.communicate(timeout=60)[0] == b"[1.0, 1.0, 1.0]\n"
    assert process.returncode == 0


def test_nothing_of_a_pair_waits_longer_than_its_deadline():
    store = pair.listening_store("127.0.0.1", 0.3)
    with pytest.raises(LinkError, match="did not join"):
        pair.join(store, pair.TRAINER, "cpu", address="127.0.0.1", seconds=0.3)
