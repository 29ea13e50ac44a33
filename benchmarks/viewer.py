"""The page on 100,000 rollouts: how soon something is seen, and how much memory its server takes.

The first paint is that of the browser's own paint timing, of the page opened at once after the
command, while the index is still being made; the time the command takes to answer is added to it.
Memory is the most the server's process has ever held, after looking at rollouts from end to end.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import note, report

sys.path.append(str(Path(__file__).parents[1]))  # the tests' synthetic runs and browser

from tests.view.browser import Page, open_browser
from tests.view.synthetic import SyntheticRun

STEPS, PROMPTS, SAMPLES = 250, 50, 8  # and an evaluation every 5 steps
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
ROWS = "document.querySelectorAll('tbody tr').length"


def look_around(page: Page, url: str) -> None:
    """Filter, sort, search, go far down, and open rollouts of many steps."""
    for query in (
        "task=calculator&correct=false",
        "sort=reward&order=ascending",
        "text=result",
        "text=nobody+says+this",
        "start=90000",
    ):
        page.open(f"{url}#/rollouts?{query}")
        page.wait("document.querySelector('.count') && location.hash.includes('?')")
    for step in range(0, STEPS, 10):
        page.open(f"{url}#/rollout?run=run&key=step-{step:06}.jsonl:{step}")
        page.wait(f"document.querySelector('aside')?.innerText.includes('step\\t{step}')")
    page.open(f"{url}#/timeline")
    page.wait("document.querySelector('.legend .swatch')")


def peak_mb(pid: int) -> float:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def measure(page: Page, folder: Path) -> None:
    started = time.monotonic()
    command = [sys.executable, "-m", "torchtitan_rl.view", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[0]
            answering = time.monotonic() - started
            page.open(f"{url}#/rollouts")
            painted = page.wait(FIRST_PAINT) / 1000
            page.wait(ROWS)
            rows = page.js("performance.now()") / 1000
            wanted = STEPS * PROMPTS * SAMPLES + STEPS // 5 * PROMPTS
            while json.loads(page.js(STATUS))["rollouts"] < wanted:
                time.sleep(0.2)
            indexed = time.monotonic() - started
            look_around(page, url)
            assert not page.problems, page.problems
            case = f"{wanted} rollouts"
            note(f"  answers after {answering:.2f} s; painted {painted:.2f} s after that")
            report("viewer", "viewer_first_paint_s", case, answering + painted)
            report("viewer", "viewer_first_rows_s", case, answering + rows)
            report("viewer", "viewer_indexed_s", case, indexed)
            report("viewer", "viewer_server_mb", case, peak_mb(server.pid))
        finally:
            server.terminate()


STATUS = "fetch('api/status?run=run&cursor=x').then(answer => answer.text())"


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary, open_browser() as page:
        note("viewer: writing rollouts ...")
        run = SyntheticRun(Path(temporary) / "run", prompts=PROMPTS, samples=SAMPLES, tokens=False)
        run.write(STEPS)
        measure(page, run.folder)


if __name__ == "__main__":
    main()
