"""The machines that tests of several hosts run on keep what they promise."""

import signal
import subprocess
import sys

import pytest

from tests.hosts.machines import Machines, alive, until

BOOT = "/proc/sys/kernel/random/boot_id"
FACTS = f"hostname; cat {BOOT}; ls /dev/shm | wc -l; ls -d /proc/[0-9]*"

LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("listening", flush=True)
while True:
    peer, _ = server.accept()
    peer.sendall(b"hello")
    peer.close()
"""

ASK = """
import socket, sys
try:
    server = socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2]))
    print(server.recv(5).decode())
except OSError as error:
    print("no answer", error)
"""


@pytest.fixture(scope="module", params=["", "processes"], ids=["best", "stand-in"])
def machines(request):
    with Machines(2, made=request.param) as machines:
        yield machines


def ask(machines: Machines, timeout: float = 5) -> str:
    done = machines[0].run([sys.executable, "-c", ASK, machines[1].address, timeout], check=True)
    return str(done.stdout).strip()


def listen(machines: Machines):
    command = [sys.executable, "-c", LISTEN, machines[1].address]
    process = machines[1].start(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "listening\n"
    return process


def test_each_has_an_address_name_processes_boot_and_shared_memory_of_its_own(machines):
    first, second = machines
    assert first.address != second.address
    if machines.stand_in:
        return  # nothing else is its own
    first.run(["touch", "/dev/shm/only-here"], check=True)
    facts = [machine.run(["sh", "-c", FACTS], check=True).stdout.split() for machine in machines]
    assert [fact[0] for fact in facts] == ["machine0", "machine1"]
    second.kill()
    second.boot()
    boots = {*(fact[1] for fact in facts), second.run(["cat", BOOT], check=True).stdout.strip()}
    assert len(boots) == 3
    assert [fact[2] for fact in facts] == ["1", "0"]
    assert all(len(fact[3:]) <= 4 for fact in facts)  # its first process, sh, ls
    resolved = first.run(["getent", "hosts", "machine1"], check=True).stdout.split()
    assert resolved == [second.address, "machine1"]


def test_they_talk_until_cut_frozen_or_killed_and_again_after(machines):
    second = machines[1]
    server = listen(machines)
    assert ask(machines) == "hello"
    second.cut()
    assert ask(machines, 0.3).startswith("no answer")
    second.restore()
    assert ask(machines) == "hello"
    second.freeze()
    assert ask(machines, 0.3) == "no answer timed out"  # the kernel accepts, nobody speaks
    second.thaw()
    assert ask(machines) == "hello"
    assert any("create_server" in line for line in second.commands())
    server.signal(signal.SIGTERM)
    assert server.wait(10) == -signal.SIGTERM

    server = listen(machines)
    second.kill()
    assert server.returncode is not None
    assert ask(machines, 0.3).startswith("no answer")
    second.boot()
    listen(machines)
    assert ask(machines) == "hello"


KILLED = """
import os, signal
from tests.hosts.machines import Machines
machines = Machines(2).__enter__()
machines[1].start(["setsid", "sleep", "1000"])
while not machines[1].pids():
    pass
inits = [machine.init for machine in machines]
print(machines._switch_pid, *inits, *machines[1].pids(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_when_the_test_is_killed():
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) >= 4, done.stderr
    until(lambda: not any(alive(pid) for pid in pids), "everything has ended")


def test_a_private_folder_has_other_files_on_every_machine(tmp_path):
    (tmp_path / "shared").write_text("")
    (tmp_path / "own").mkdir()
    with Machines(2, private=[tmp_path / "own"], resolve=False) as (first, second):
        assert first.run(["getent", "hosts", second.name]).returncode != 0
        first.run(["touch", tmp_path / "own" / "first"], check=True)
        assert second.run(["ls", tmp_path, tmp_path / "own"]).stdout.split() == [
            *(f"{tmp_path}:", "own", "shared"),
            f"{tmp_path / 'own'}:",
        ]
        pids = [first.init, second.init]
    assert not any(alive(pid) for pid in pids)
