"""What is done once for shards that come again, and that no byte of them changes unseen."""

import pytest
import torch

from torchtitan_rl.weight_sync.handle import Shard, whole_tensors
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.transport import make_publisher


@pytest.fixture
def publisher():
    publisher = make_publisher("shm", checksums=False)
    yield publisher
    publisher.close()


def read(handle):
    with open_snapshot(handle) as snapshot:
        return {name: tensor.clone() for name, tensor in snapshot.tensors()}


def assert_holds(handle, live):
    fetched = read(handle)
    assert list(fetched) == list(live)
    for name, tensor in live.items():
        assert torch.equal(fetched[name], tensor.to(fetched[name].dtype)), name


SIZES = [0, 1, 63, 64, 65, 1000]  # bytes: none, less than a look, a look, more


@pytest.mark.parametrize("at", [0, -1], ids=["first byte", "last byte"])
@pytest.mark.parametrize("size", SIZES[1:])
def test_one_byte_makes_a_difference(publisher, size, at):
    live = {str(n): torch.randint(0, 255, (n,), dtype=torch.uint8) for n in SIZES}
    shards = whole_tensors(live.items())
    first = publisher.publish(shards, 0)
    assert publisher.publish(shards, 1).changed_since(first) == set()
    for version in range(2, 5):  # both buffers, and the first again
        before = publisher.publish(shards, version)
        live[str(size)][at] ^= 1
        handle = publisher.publish(shards, version)
        assert handle.changed_since(before) == {str(size)}
        assert handle.changed_bytes == size
        assert_holds(handle, live)


def test_the_same_shards_are_prepared_once_and_others_anew(publisher):
    live = {"w": torch.ones(100), "b": torch.ones(3)}
    shards = whole_tensors(live.items())
    handles, plans = [], []
    for version in range(6):
        if version == 3:  # the tensors move to other memory
            live = {name: tensor.clone() for name, tensor in live.items()}
            shards = whole_tensors(live.items())
        live["w"] += 1
        handles.append(publisher.publish(list(shards), version))
        plans.append(publisher._plan)
        assert_holds(handles[-1], live)
    assert [plan is plans[0] for plan in plans] == [True, True, True, False, False, False]
    assert plans[3] is plans[5]
    # What has only moved has not changed, and goes into the same buffers.
    assert handles[-1].changed_since(handles[0]) == {"w"}
    assert len({handle.parts[0].location for handle in handles}) == 2


def test_one_shard_that_is_another_is_not_taken_for_the_old_one(publisher):
    live = {"w": torch.zeros(100), "b": torch.zeros(3)}
    shards = whole_tensors(live.items())
    publisher.publish(shards, 0)
    live["b"] = torch.ones(3)
    shards[1:] = whole_tensors([("b", live["b"])])  # in the same list
    assert_holds(publisher.publish(shards, 1), live)
    live.pop("b")
    assert_holds(publisher.publish(shards[:1], 2), live)


def test_the_same_shards_in_another_dtype(publisher):
    live = {"w": torch.randn(100)}
    shards = whole_tensors(live.items())
    for version, dtype in enumerate([None, torch.bfloat16, torch.bfloat16, None]):
        live["w"] += 1
        handle = publisher.publish(shards, version, dtype=dtype)
        assert handle.tensors()["w"][1] == (dtype or torch.float32)
        assert_holds(handle, live)


def test_what_cannot_be_taken_as_it_is_is_compared_and_copied_all_the_same(publisher):
    base = torch.randn(40, 50)
    live = {"turned": base.t(), "plain": torch.randn(50, 40), "single": torch.randn(7)}
    shards = whole_tensors(live.items())
    last = publisher.publish(shards, 0)
    assert [memory is None for memory in publisher._plan.memory] == [True, False, False]
    for version, changed in enumerate(["turned", "plain", "single", "turned"], start=1):
        live[changed].view(-1)[-1:].add_(1) if changed != "turned" else base[-1, -1].add_(1)
        handle = publisher.publish(shards, version)
        assert handle.changed_since(last) == {changed}
        assert_holds(handle, live)
        last = handle


def test_the_same_values_in_another_order_of_memory_are_unchanged(publisher):
    turned = torch.randn(40, 50).t()
    last = publisher.publish(whole_tensors([("w", turned)]), 0)
    for version, same in enumerate([turned.contiguous(), turned, turned.clone()], start=1):
        handle = publisher.publish(whole_tensors([("w", same)]), version)
        assert handle.changed_since(last) == set()
        assert_holds(handle, {"w": turned})


def test_a_publication_that_failed_is_none(publisher, monkeypatch):
    live = {"w": torch.zeros(100)}
    shards = whole_tensors(live.items())
    handles = [publisher.publish(shards, version) for version in range(2)]
    buffer = publisher._older.buffer
    with monkeypatch.context() as patch:
        patch.setattr(buffer, "seal", lambda *_: 1 / 0)
        live["w"] += 1
        with pytest.raises(ZeroDivisionError):
            publisher.publish(shards, 2)
    live["w"] -= 1
    handle = publisher.publish(shards, 2)
    assert handle.changed_since(handles[-1]) == set()
    assert_holds(handle, live)


def test_a_shard_of_which_one_piece_changed_is_changed(publisher):
    pieces = torch.zeros(2, 30), torch.zeros(3, 30)
    shards = [Shard("w", (5, 30), (0, 0), pieces), *whole_tensors([("b", torch.ones(3))])]
    last = publisher.publish(shards, 0)
    for version, piece in enumerate([0, 1, 1, 0], start=1):
        pieces[piece][-1, -1] += 1
        handle = publisher.publish(shards, version)
        assert handle.changed_since(last) == {"w"}
        assert torch.equal(read(handle)["w"], torch.cat(pieces))
        last = handle


def test_memory_that_is_published_cannot_be_freed_under_the_publisher(publisher):
    tensor = torch.ones(10)
    publisher.publish(whole_tensors([("w", tensor)]), 0)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
