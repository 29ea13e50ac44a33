"""Makes pictures of every view of the page, at the widths of a desktop and of a phone.

`python scripts/screenshots.py <folder for the pictures> outputs/<run> outputs/<other>` shows the
first run alone, all of them together, and the timelines of the first and the last.
`python scripts/screenshots.py --docs docs outputs/<run> outputs/<other>` makes those of docs/.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the browser of the tests

from tests.view.browser import Page, open_browser

ROOT = Path(__file__).parents[1]
SIZES = {1280: 720, 390: 844}
WRONG = "rollouts?split=train&correct=false"


def wait_for_charts(page: Page) -> None:
    page.wait_for(".chart canvas")


def wait_for_rows(page: Page) -> None:
    page.wait_for("tbody tr")


def wait_for_spans(page: Page) -> None:
    page.wait_for(".legend .swatch")


def open_rollout(page: Page) -> None:
    wait_for_rows(page)
    page.click("tbody tr td")
    page.wait("document.querySelectorAll('.turn').length > 1")


def show_tokens(page: Page) -> None:
    open_rollout(page)
    page.js("document.querySelector('[data-mode=token_logprobs]').click()")


def show_messages(page: Page) -> None:
    open_rollout(page)
    page.js("document.querySelector('[data-as=messages]').click()")


def compare(page: Page) -> None:
    open_rollout(page)
    page.js("document.querySelector('#compare').click()")
    page.wait("document.querySelectorAll('.pane .t').length > 20")


@dataclass(frozen=True)
class Shot:
    """A view to take a picture of: its name and address, what to do there, and for which runs."""

    name: str
    address: str
    act: Callable[[Page], None]
    runs: str = "first"
    in_docs: bool = False

    def shown(self, runs: list[str]) -> list[str]:
        return {"first": runs[:1], "last": runs[-1:], "all": runs}[self.runs]


SHOTS = (
    Shot("overview", "overview", wait_for_charts, in_docs=True),
    Shot("runs", "overview", wait_for_charts, "all", in_docs=True),
    Shot("rollouts", "rollouts?split=train", wait_for_rows, in_docs=True),
    Shot("rollouts-runs", "rollouts", wait_for_rows, "all"),
    Shot("tokens", WRONG, show_tokens, in_docs=True),
    Shot("messages", WRONG, show_messages),
    Shot("compare", WRONG, compare, in_docs=True),
    Shot("timeline-first", "timeline", wait_for_spans),
    Shot("timeline", "timeline", wait_for_spans, "last", in_docs=True),
)


def take(page: Page, url: str, shot: Shot, runs: list[str], path: Path, *, whole: bool) -> None:
    """Open a view in a fresh page that shows the shot's runs, and take its picture."""
    page.open("about:blank")
    page.open(url)
    page.wait("document.querySelector('#status span')")
    page.js(
        "(localStorage.clear(), sessionStorage.clear(),"
        f" sessionStorage.setItem('chosen', JSON.stringify({shot.shown(runs)})))"
    )
    page.open("about:blank")
    page.open(f"{url}#/{shot.address}")
    page.wait("document.querySelector('#status span')")
    page.wait_for(".indexing", 0)
    shot.act(page)
    page.js("new Promise(done => setTimeout(done, 400))")  # charts take their size
    page.screenshot(path, whole=whole)
    print(path, page.js("document.documentElement.scrollWidth"), "px wide", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--docs", action="store_true", help="only the pictures of docs/")
    options = parser.parse_args()
    names = [run.resolve().name for run in options.runs]
    command = [sys.executable, "-m", "torchtitan_rl.view", "--port", "0"]
    command += [str(run.resolve()) for run in options.runs]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[0]
            with open_browser() as page:
                for width, height in [(1280, 720)] if options.docs else SIZES.items():
                    page.resize(width, height, phone=width < 600)
                    for shot in SHOTS:
                        if options.docs and not shot.in_docs:
                            continue
                        name = f"view-{shot.name}" if options.docs else f"{shot.name}-{width}"
                        path = options.folder / f"{name}.png"
                        take(page, url, shot, names, path, whole=not options.docs)
                assert page.problems == [], page.problems
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
