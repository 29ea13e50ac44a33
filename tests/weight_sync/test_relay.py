"""Weights from host to host: a process on each machine, a network to cut, machines to kill."""

import asyncio
import contextlib
import os
import socket
import time
from dataclasses import replace

import pytest
import torch

from tests.hosts.machines import Machines, until
from tests.weight_sync.relay_hosts import SIZE, SLOT, SLOTS, Host, Rank, Slow, handle_of, reach
from torchtitan_rl.weight_sync.handle import (
    StaleHandleError,
    WeightSyncError,
    WrongWeightsError,
    whole_tensors,
)
from torchtitan_rl.weight_sync.memory_file import (
    HEADER_BYTES,
    MemoryFile,
    OpenMemoryFile,
    ShmLocation,
)
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.relay import Relay, SourceError, location_in
from torchtitan_rl.weight_sync.spread import spread
from torchtitan_rl.weight_sync.stream import Stream, StreamError, connect
from torchtitan_rl.weight_sync.transport import make_publisher

SECONDS = 1.0
"""What the other end of a transfer may do nothing for."""


@pytest.fixture(scope="module")
def machines():
    with Machines(4) as machines:
        yield machines


@pytest.fixture
def hosts(machines):
    started = [Host(machine, SECONDS) for machine in machines]
    yield [host.ready() for host in started]
    for host in started:
        host.close()
    for machine in machines:
        machine.kill()
        machine.boot()


async def reach_all(rank, hosts, handle):
    there = await reach(handle, rank.host, hosts)
    assert there.errors == {}
    expected = rank.host.read(handle)
    assert {host.read(there.handles[host.name]) for host in hosts} == {expected}
    return there.handles


# ---- bytes -------------------------------------------------------------------------------------


async def test_the_trainers_wire_carries_weights_once_and_only_what_has_changed(hosts):
    trainer, *others = hosts
    for count in (1, 2, 3):
        rank, chain = Rank(trainer), others[:count]
        before = [host.sent() for host in hosts]
        await reach_all(rank, chain, rank.publish(1))
        sent = [host.sent() - first for host, first in zip(hosts, before, strict=True)]
        for number, out in enumerate(sent):
            hands_on = number < count
            assert hands_on * SIZE <= out <= hands_on * 1.1 * SIZE + 0.05 * SIZE

        before = trainer.sent()
        await reach_all(rank, chain, rank.publish(2, 1))
        assert SLOT <= trainer.sent() - before <= 1.1 * SLOT


async def test_of_two_publications_only_what_has_changed_since_the_last_travels(hosts):
    trainer, first, second, _ = hosts
    rank, received = Rank(trainer), []
    for seeds, chain in [
        ((1,), (first, second)),
        ((2, 1), (first, second)),  # goes to a second memory, filled from the first
        ((2, 3, 1), (first,)),
        ((2, 3, 4, 1), (first, second)),  # the second host has missed one
        ((2, 3, 4, 1), (first, second)),
    ]:
        before = [host.received() for host in (first, second)]
        await reach_all(rank, chain, rank.publish(*seeds))
        pairs = zip((first, second), before, strict=True)
        received.append([(host.received() - earlier) // SLOT for host, earlier in pairs])
    assert received == [[SLOTS, SLOTS], [1, 1], [1, 0], [1, 2], [0, 0]]


# ---- failures ----------------------------------------------------------------------------------


async def test_bytes_are_handed_on_as_they_come_and_past_a_host_that_dies_meanwhile(hosts):
    trainer, *others = hosts
    slow = Slow(trainer.machine, stop_after=SIZE // 2)
    handle = handle_of(99, 1, ShmLocation(1, 1, HEADER_BYTES + SIZE, 1), [1] * SLOTS)
    stand_in = Stand(trainer.name, slow.relay)
    reaching = asyncio.create_task(reach(handle, stand_in, others))
    await asyncio.to_thread(slow.wait)
    last = others[-1].machine
    if not last.machines.stand_in:  # the chain has no more than the trainer's host has sent
        await asyncio.to_thread(until, lambda: others[1].machine.bytes_sent() > SIZE / 2, "half")
    others[1].machine.kill()
    slow.go_on()
    there = await reaching
    slow.close()
    assert set(there.handles) == {others[0].name, others[2].name}
    [error] = there.errors.values()
    assert isinstance(error, ConnectionError)
    read = [others[n].read(there.handles[others[n].name]) for n in (0, 2)]
    assert read[0] == read[1]


async def test_a_network_that_is_cut_ends_a_transfer_in_time(hosts):
    trainer, *others = hosts
    slow = Slow(trainer.machine, pause=0.01)
    handle = handle_of(99, 1, ShmLocation(1, 1, HEADER_BYTES + SIZE, 1), [1] * SLOTS)
    reaching = asyncio.create_task(reach(handle, Stand(trainer.name, slow.relay), others))
    await asyncio.sleep(0.3)
    assert not reaching.done()
    trainer.machine.cut()
    cut = time.monotonic()
    there = await reaching
    trainer.machine.restore()
    slow.close()
    # One host notices; one more is asked to try, and cannot connect.
    assert time.monotonic() - cut < 2 * SECONDS + 1
    assert set(there.errors) == {host.name for host in others}
    where = f"{trainer.machine.address}:{slow.relay['port']}"
    for error in there.errors.values():
        assert isinstance(error, SourceError)
        assert where in str(error)


class Stand:
    """A host whose relay is a script."""

    def __init__(self, name, relay):
        self.name, self.relay = name, relay


async def test_a_publication_that_was_overwritten_is_said_to_be_stale_on_every_host(hosts):
    trainer, *others = hosts
    rank = Rank(trainer)
    first = rank.publish(1)
    handles = await reach_all(rank, others[:1], first)
    for seed in (2, 3):
        rank.publish(seed)
    there = await reach(first, trainer, others[1:])
    assert there.handles == {}
    assert set(there.errors) == {host.name for host in others[1:]}
    for error in there.errors.values():
        assert isinstance(error, StaleHandleError)
        assert "policy version 1 was overwritten" in str(error)
        assert "pull the latest handle" in str(error)
    others[0].read(handles[others[0].name])  # who had it keeps it


async def test_a_host_without_a_trainer_or_a_relay_is_named(hosts):
    trainer, other, *_ = hosts
    rank = Rank(trainer)
    handle = rank.publish(1)
    trainer.machine.kill()
    there = await reach(handle, trainer, [other])
    [error] = there.errors.values()
    assert isinstance(error, SourceError)
    assert trainer.machine.address in str(error)


# ---- one relay ---------------------------------------------------------------------------------


@pytest.fixture
def relays():
    relays = [Relay("127.0.0.1", seconds=SECONDS) for _ in range(2)]
    yield relays
    for relay in relays:
        relay.close()


@pytest.fixture
def file():
    file = MemoryFile(100_000)
    yield file
    with contextlib.suppress(AttributeError):  # the test has closed it
        file.close()


def order(file, relay, *, number=1, publisher=7, changed=None, held=False, **given):
    where = file.location
    location = [where.pid, where.fd, where.size, where.token]
    return {
        "publisher": publisher,
        "number": number,
        "version": number,
        "size": where.size - HEADER_BYTES,
        "slots": [[0, where.size - HEADER_BYTES, changed or number]],
        "source": {**relay.location, "location": None if held else location},
        **given,
    }


def asking(relay, **request):
    """A connection with a relay that has been sent a request."""
    stream = connect("127.0.0.1", relay.location["port"], SECONDS)
    stream.send_message({"token": relay.location["token"]})
    asked = {"number": 1, "version": 1, "size": 100_000, "attempt": 0, "ranges": [[0, 100_000]]}
    stream.send_message({**asked, **request})
    return stream


def locked(location, number):
    file = OpenMemoryFile(ShmLocation(*location))
    file.lock(number, number)
    return file


def data_of(file):
    return os.pread(file.fd, file.location.size, HEADER_BYTES)


async def test_what_is_sent_cannot_be_overwritten_until_it_has_arrived(relays, file):
    """The kernel sends what is queued from the pages of the file."""
    file.seal(1, 1)
    where = [getattr(file.location, name) for name in ("pid", "fd", "size", "token")]
    reader = asking(relays[0], publisher=7, location=where)
    assert reader.receive_frame() == 100_000
    assert not file.reopen()
    data = memoryview(bytearray(100_000))
    assert reader.receive_into(data) == 100_000
    await asyncio.sleep(0.2)
    assert not file.reopen()  # the relay cannot know that yet
    reader.acknowledge()
    until(file.reopen, "the file is given back")


async def test_a_copy_that_is_handed_on_is_not_received_into(relays, file):
    first, second = relays
    file.seal(1, 1)
    location = await asyncio.to_thread(first.fetch, order(file, second))
    reader = asking(first, publisher=7, location=None)
    assert reader.receive_frame() == 100_000
    for number in (2, 3):
        until(file.reopen, "the file is given back")
        file.seal(number, number)
        fresh = await asyncio.to_thread(first.fetch, order(file, second, number=number))
        assert fresh[3] != location[3]
    reader.close()
    for number in (4, 5):
        until(file.reopen, "the file is given back")
        file.seal(number, number)
        later = await asyncio.to_thread(first.fetch, order(file, second, number=number))
    assert later[3] == fresh[3]  # two are enough now


async def test_a_copy_that_is_read_is_left_to_its_reader(relays, file):
    first, second = relays
    file.map[HEADER_BYTES:] = bytes([1]) * 100_000
    file.seal(1, 1)
    location = await asyncio.to_thread(first.fetch, order(file, second))
    reading = locked(location, 1)
    for number in (2, 3, 4):
        until(file.reopen, "the file is given back")
        file.map[HEADER_BYTES : HEADER_BYTES + 10] = bytes([number]) * 10
        file.seal(number, number)
        slots = [[0, 10, number], [10, 99_990, 1]]
        here = await asyncio.to_thread(first.fetch, order(file, second, number=number, slots=slots))
        newest = locked(here, number)
        assert data_of(newest) == file.map[HEADER_BYTES:]
        newest.close()
    assert data_of(reading) == bytes([1]) * 100_000
    reading.close()
    assert first.received == 100_000 + 3 * 10


async def test_an_older_publication_takes_nothing_from_a_newer_copy(relays, file):
    first, second = relays
    older = MemoryFile(100_000)
    for number, of in ((1, file), (3, file), (2, older), (4, older)):
        until(of.reopen, "the file is given back")
        of.map[HEADER_BYTES:] = bytes([number]) * 100_000
        of.seal(number, number)
        here = await asyncio.to_thread(first.fetch, order(of, second, number=number))
        copy = locked(here, number)
        assert data_of(copy) == bytes([number]) * 100_000
        copy.close()
    older.close()


async def test_a_fetch_that_fails_leaves_the_newer_copy_and_nothing_of_its_own(relays, file):
    first, second = relays
    locations = []
    for number in (1, 2):
        until(file.reopen, "the file is given back")
        file.seal(number, number)
        locations.append(await asyncio.to_thread(first.fetch, order(file, second, number=number)))
    until(file.reopen, "the file is given back")
    file.seal(4, 4)
    for _ in range(2):
        with pytest.raises(StaleHandleError, match="policy version 3 was overwritten"):
            await asyncio.to_thread(first.fetch, order(file, second, number=3))
    locked(locations[1], 2).close()
    with pytest.raises(StaleHandleError):
        locked(locations[0], 1)
    with pytest.raises(WeightSyncError):
        locked(locations[0], 3)
    again = await asyncio.to_thread(first.fetch, order(file, second, number=4))
    locked(again, 4).close()


async def test_a_relay_is_asked_before_it_has_its_own_order(relays, file):
    first, second = relays
    file.seal(1, 1)
    later = asyncio.create_task(asyncio.to_thread(second.fetch, order(file, first, held=True)))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(first.fetch, order(file, first))
    locked(await later, 1).close()
    started = time.monotonic()
    with pytest.raises(SourceError, match=r"127\.0\.0\.1.* no order for policy version 2 for 1 s"):
        await asyncio.to_thread(second.fetch, order(file, first, number=2, held=True))
    assert time.monotonic() - started < 2 * SECONDS


async def test_who_waits_is_told_that_there_is_someone(relays, file):
    """The second waits for longer than its deadline, and no host is silent for so long."""
    first, second = relays
    held = order(file, first, held=True)
    later = asyncio.create_task(asyncio.to_thread(second.fetch, held))
    await asyncio.sleep(0.7 * SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = {"address": "127.0.0.1", "port": listener.getsockname()[1], "token": "x"}
        asked = order(file, first, source={**source, "location": None})
        fetching = asyncio.create_task(asyncio.to_thread(first.fetch, asked))
        stream = Stream((await asyncio.to_thread(listener.accept))[0], SECONDS)
        await asyncio.sleep(0.7 * SECONDS)
        stream.send_file(file.fd, HEADER_BYTES, 100_000)
        await asyncio.gather(fetching, later)
        stream.close()


async def test_who_waits_for_a_later_attempt_is_not_told_that_an_earlier_one_failed(relays, file):
    first, second = relays
    with pytest.raises(StaleHandleError):  # it is being written
        await asyncio.to_thread(first.fetch, order(file, second, attempt=1))

    def asked(attempt):
        held = order(file, first, held=True)
        held["source"]["attempt"] = attempt
        return asyncio.create_task(asyncio.to_thread(second.fetch, held))

    with pytest.raises(SourceError, match=r"cannot hand on policy version 1: .* being rewritten"):
        await asked(1)
    later = asked(2)
    await asyncio.sleep(0.1)
    file.seal(1, 1)
    await asyncio.to_thread(first.fetch, order(file, second, attempt=2))
    locked(await later, 1).close()


async def test_two_that_wait_for_each_other_do_not_for_ever(relays, file):
    first, second = relays
    fetches = (
        asyncio.to_thread(to.fetch, order(file, source, held=True))
        for to, source in ((first, second), (second, first))
    )
    started = time.monotonic()
    for error in await asyncio.gather(*fetches, return_exceptions=True):
        assert isinstance(error, SourceError)
    assert time.monotonic() - started < 3 * SECONDS + 1


async def test_an_order_twice_fetches_once(relays, file):
    first, second = relays
    file.seal(1, 1)
    one, other = await asyncio.gather(
        *(asyncio.to_thread(first.fetch, order(file, second)) for _ in range(2))
    )
    assert one == other
    assert first.received == 100_000


async def test_copies_of_a_trainer_that_was_replaced_are_dropped(relays, file):
    first, second = relays
    file.seal(1, 1)
    old = await asyncio.to_thread(first.fetch, order(file, second, publisher=7, publishers=[7, 8]))
    new = await asyncio.to_thread(first.fetch, order(file, second, publisher=8, publishers=[7, 8]))
    locked(old, 1).close()
    await asyncio.to_thread(first.fetch, order(file, second, publisher=9, publishers=[8, 9]))
    locked(new, 1).close()
    with pytest.raises(WeightSyncError):
        locked(old, 1)


async def test_a_wrong_token_gets_nothing(relays, file):
    first, second = relays
    file.seal(1, 1)
    wrong = {**order(file, second)["source"], "token": "0" * 32}
    with pytest.raises(SourceError, match=r"from 127\.0\.0\.1:\d+: the other end"):
        await asyncio.to_thread(first.fetch, order(file, second, source=wrong))
    stream = connect("127.0.0.1", second.location["port"], SECONDS)
    stream.send_message({"token": second.location["token"][:-1]})
    with pytest.raises(StreamError):
        stream.receive_frame()
    assert second.sent == 0


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"size": 99_999}, "have 100000 bytes here, 99999"),
        ({"ranges": [[0, 100_001]]}, "bytes 0 to 100001"),
        ({"ranges": [[10, 20], [0, 5]]}, "bytes 0 to 5"),
        ({"ranges": [[-4096, 5]]}, "bytes -4096 to 5"),
    ],
)
async def test_only_bytes_of_the_data_can_be_asked_for(relays, file, request_, said):
    file.seal(1, 1)
    where = [getattr(file.location, name) for name in ("pid", "fd", "size", "token")]
    stream = asking(relays[0], publisher=7, location=where, **request_)
    answer = stream.receive_frame()
    assert said in answer["text"]


async def test_another_file_than_published_weights_is_not_sent(relays, file, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(200_000))
    with secret.open("rb") as opened:
        where = [file.location.pid, opened.fileno(), 104_096, file.location.token]
        stream = asking(relays[0], publisher=7, location=where)
        assert stream.receive_frame()["kind"] == "stale"


async def test_a_closed_relay_ends_what_waits_for_it(relays, file):
    first, second = relays
    waiting = asyncio.create_task(asyncio.to_thread(first.fetch, order(file, second, held=True)))
    await asyncio.sleep(0.1)
    second.close()
    with pytest.raises(SourceError, match="has gone"):
        await waiting


async def test_a_frame_that_is_longer_than_what_is_wanted_is_refused(relays, file):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = {"address": "127.0.0.1", "port": listener.getsockname()[1], "token": "x"}
        asked = order(file, relays[0], source={**source, "location": None})
        fetching = asyncio.create_task(asyncio.to_thread(relays[0].fetch, asked))
        stream = Stream((await asyncio.to_thread(listener.accept))[0], SECONDS)
        for _ in range(2):
            stream.receive_message(1 << 20)
        with contextlib.suppress(StreamError):  # it does not wait for all of it
            stream.send_file(file.fd, 0, 100_001)
        with pytest.raises(SourceError, match="sends 100001 bytes, and 100000 are wanted"):
            await fetching


# ---- from a publisher to a reader ---------------------------------------------------------------


async def test_tensors_arrive_and_damage_on_the_way_is_noticed(relays):
    publisher = make_publisher("relay")
    tensors = {"w": torch.randn(300, 100), "b": torch.ones(3).bfloat16()}
    handle = publisher.publish(whole_tensors(tensors.items()), version=4)
    names = {"home": relays[0], "other": relays[1]}

    async def fetch(host, given):
        return location_in(await asyncio.to_thread(names[host].answer, given))

    where = {name: relay.location for name, relay in names.items()}
    there = await spread(handle, ["home"], ["home", "other"], where, fetch)
    assert there.errors == {}
    assert there.handles["home"].parts == handle.parts
    for here in there.handles.values():
        assert (here.version, here.transport) == (4, "shm")
        with open_snapshot(here) as snapshot:
            snapshot.verify()
            for name, tensor in snapshot.tensors():
                assert torch.equal(tensor, tensors[name])
    [part] = there.handles["other"].parts
    [copy] = relays[1]._copies._of[part.publisher]
    copy.data[0] ^= 1
    with (
        open_snapshot(there.handles["other"]) as snapshot,
        pytest.raises(WrongWeightsError, match="the bytes of w are not those"),
    ):
        snapshot.verify()
    with pytest.raises(ValueError, match="snapshots of rdma are not handed on"):
        await spread(replace(handle, transport="rdma"), ["home"], ["other"], where, fetch)
    publisher.close()
