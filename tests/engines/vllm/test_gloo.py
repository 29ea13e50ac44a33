"""Process groups of real ranks that share gloo's thread."""

import subprocess
import sys

SCRIPT = """
import sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torchtitan_rl.engines.vllm.cpu import gloo_loop

def loops():
    names = [(t / "comm").read_text().strip() for t in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")

store, rank, shares = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "shares"
if shares:
    gloo_loop.apply()
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
groups = [dist.new_group([0, 1], timeout=timedelta(seconds=20)) for _ in range(3)]
for number, group in enumerate(groups):
    value = torch.tensor([float(rank + 10 * number)])
    dist.all_reduce(value, group=group)
    assert value.item() == 1 + 20 * number, value
assert isinstance(groups[0]._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
assert groups[0]._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=20)
print(loops())
dist.destroy_process_group()
"""


def loops_of_each_rank(store, how):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(store), str(rank), how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], [errors for _, errors in said]
    return [int(out) for out, _ in said]


def test_all_groups_of_a_process_share_one_loop_and_still_work(tmp_path):
    assert loops_of_each_rank(tmp_path / "shared", "shares") == [1, 1]


def test_without_it_each_group_has_one(tmp_path):
    """If gloo ever does so by itself, gloo_loop.py can go."""
    assert loops_of_each_rank(tmp_path / "apart", "does not") == [4, 4]
