"""Monarch's server of one session of a worker: the parent of all processes that the run starts.

It is made anew for each session, at a port and under an identity that only its controller is told.
"""

import os
import socket
import sys

from setproctitle import setproctitle

from torchtitan_rl.hosts.addresses import family_of, join_address
from torchtitan_rl.platform.parent import die_with
from torchtitan_rl.platform.worker_main import PARENT_VARIABLE

READY = "serving at "
"""Beginning of the line that says where the server is."""


def main() -> None:
    """Serve at a free port of the address in the first argument until the worker ends."""
    address, parent = sys.argv[1], int(sys.argv[2])
    die_with(parent)
    setproctitle("torchtitan-rl worker, processes of a run")
    # What is started here inherits it, and ends with this process.
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    from monarch.actor import run_worker_loop_forever
    from monarch.job import new_service_proc_id, service_proc_addr

    # The kernel gives a port to one process at a time, so hardly anybody else gets it meanwhile.
    with socket.create_server((address, 0), family=family_of(address)) as probe:
        port = probe.getsockname()[1]
    # The identity is random: who does not know it gets no answer.
    server = service_proc_addr(f"tcp://{join_address(address, port)}", new_service_proc_id())
    print(f"{READY}{server}", flush=True)
    os.dup2(2, 1)  # nobody reads the pipe any more
    run_worker_loop_forever(address=server, ca="trust_all_connections")


if __name__ == "__main__":
    main()
