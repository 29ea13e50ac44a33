"""Any order of publishing and reading: whoever reads sees what was published, and nothing else."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl.weight_sync.handle import StaleHandleError, whole_tensors
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.transport import make_publisher


class Schedule:
    """A publisher and its readers, in any order; what each reader must see is known."""

    def __init__(self, checksums):
        self.publisher = make_publisher("shm", checksums=checksums)
        self.live = {name: torch.zeros(40) for name in "abcd"}
        self.handles, self.values, self.readers = [], [], []

    def publish(self, how):
        changed, version = how  # any version: it may be published twice, or an older one again
        for name in changed:
            self.live[name][len(self.handles) % 40] += 1
        handle = self.publisher.publish(whole_tensors(self.live.items()), version)
        self.handles.append(handle)
        self.values.append({name: t.clone() for name, t in self.live.items()})
        for older, values in zip(self.handles, self.values, strict=True):
            differ = {n for n, t in self.live.items() if not torch.equal(values[n], t)}
            assert differ <= handle.changed_since(older)
        if len(self.handles) > 1:
            assert handle.changed_since(self.handles[-2]) == set(changed)

    def open(self, back):
        number = len(self.handles) - 1 - back
        if number < 0:
            return
        try:
            self.readers.append((number, open_snapshot(self.handles[number])))
        except StaleHandleError:
            assert back >= 2  # the two newest can always be read

    def close(self, number):
        if self.readers:
            self.readers.pop(number % len(self.readers))[1].close()

    def check(self):
        for number, reader in self.readers:
            reader.verify()
            for name, tensor in reader.tensors():
                assert torch.equal(tensor, self.values[number][name])


STEPS = st.one_of(
    st.tuples(st.just("publish"), st.tuples(st.sets(st.sampled_from("abcd")), st.integers(0, 5))),
    st.tuples(st.just("open"), st.integers(0, 4)),
    st.tuples(st.just("close"), st.integers(0, 4)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=30), st.booleans())
def test_whoever_reads_whatever_and_however_long_sees_one_version(steps, checksums):
    schedule = Schedule(checksums)
    try:
        schedule.publish(("abcd", 0))
        for what, argument in steps:
            getattr(schedule, what)(argument)
            schedule.check()
    finally:
        while schedule.readers:
            schedule.close(0)
        schedule.publisher.close()
