"""Readers and writers that die half-way: whoever is left goes on, and nothing stays behind."""

import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from torchtitan_rl.weight_sync.handle import StaleHandleError, WeightSyncError, whole_tensors
from torchtitan_rl.weight_sync.reading import open_snapshot
from torchtitan_rl.weight_sync.transport import make_publisher

ROOT = Path(__file__).parents[2]

READER = """
import pickle, sys
from torchtitan_rl.weight_sync.reading import open_snapshot
snapshot = open_snapshot(pickle.load(sys.stdin.buffer))
next(snapshot.tensors())
print("reading", flush=True)
sys.stdin.buffer.read(1)
"""

WRITER = """
import pickle, sys, time, torch
from torchtitan_rl.weight_sync.handle import whole_tensors
from torchtitan_rl.weight_sync.transport import make_publisher

def say(handle):
    pickle.dump(handle, sys.stdout.buffer)
    sys.stdout.buffer.flush()

transport, folder = sys.argv[1:]
publisher = make_publisher(transport, folder=folder)
old = publisher.publish(whole_tensors([("w", torch.ones(50_000))]), version=1)
publisher.publish(whole_tensors([("w", torch.ones(50_000) + 1)]), version=2)
say(old)

def half_way():  # what was copied is not sealed yet, nor its file renamed
    say("half-way")
    time.sleep(600)

publisher.publish(whole_tensors([("w", torch.ones(50_000) + 2)]), version=3, copied=half_way)
"""


def start(script, *arguments):
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)


def weights(value):
    return whole_tensors([("w", torch.full((50_000,), float(value))), ("b", torch.ones(3))])


def wait_until(true, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, None], ids=str)
def test_a_reader_that_ends_half_way_gives_its_buffer_back(ending):
    publisher = make_publisher("shm")
    handle = publisher.publish(weights(1), version=1)
    with start(READER) as reader:
        pickle.dump(handle, reader.stdin)
        reader.stdin.flush()
        assert reader.stdout.readline() == b"reading\n"
        taken = publisher.publish(weights(2), version=2).parts[0].location
        fresh = publisher.publish(weights(3), version=3).parts[0].location
        # The reader's buffer was left to it, and another one taken.
        assert fresh.token not in (handle.parts[0].location.token, taken.token)
        if ending:
            reader.send_signal(ending)
        else:
            reader.stdin.close()
        reader.wait()
    again = publisher.publish(weights(4), version=4).parts[0].location
    assert again.token == taken.token
    with pytest.raises(WeightSyncError):
        open_snapshot(handle)
    publisher.close()


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT], ids=str)
@pytest.mark.parametrize("transport", ["shm", "file"])
def test_a_writer_that_ends_half_way_leaves_nothing(tmp_path, transport, ending):
    folder = tmp_path / "weights"
    with start(WRITER, transport, str(folder)) as writer:
        try:
            old = pickle.load(writer.stdout)
            assert pickle.load(writer.stdout) == "half-way"
            # Version 1 is being overwritten, which is said; it is not read half.
            with pytest.raises(StaleHandleError, match="policy version 1"):
                open_snapshot(old)
            files = [os.readlink(fd) for fd in Path(f"/proc/{writer.pid}/fd").iterdir()]
        finally:
            writer.send_signal(ending)
    assert writer.returncode != 0
    if transport == "shm":
        assert any("memfd:torchtitan_rl_weights" in file for file in files)
    wait_until(lambda: not list(tmp_path.glob("weights*")))
    # Nothing that has a name: that would outlive the process.
    assert not any(file.startswith("/dev/shm") for file in files)
    with pytest.raises(WeightSyncError):
        open_snapshot(old)


def test_a_snapshot_that_was_open_when_its_writer_died_can_be_read_to_the_end(tmp_path):
    script = WRITER.replace("say(old)", "say(old); time.sleep(600)")
    with start(script, "shm", str(tmp_path)) as writer:
        try:
            handle = pickle.load(writer.stdout)
            snapshot = open_snapshot(handle)
        finally:
            writer.kill()
    with snapshot:
        assert torch.equal(dict(snapshot.tensors())["w"], torch.ones(50_000))
