"""The page in a real browser, on runs that go on while it is open.

The screenshots in docs/ are made here: `SCREENSHOTS=docs make test ARGS=tests/view` writes them
anew; otherwise they go to a temporary folder, and those in docs/ must be there.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.view.browser import BrowserMissing, Page, find_browser, open_browser
from tests.view.synthetic import SyntheticRun, write_lines

ROOT = Path(__file__).parents[2]
SHOTS = ("overview", "rollouts", "tokens", "compare", "timeline")
BACKGROUND = "getComputedStyle(e).backgroundColor"
EVIL = (
    "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    "\x00\x1b[31m\u202eevil\u200b\ud800 &lt;b&gt;"
)
SHOWN = "␀␛[31m⟨U+202E⟩evil⟨U+200B⟩\\ud800 &lt;b&gt;"


class Opened:
    """Two runs, their server and a browser."""

    def __init__(self, page: Page, url: str, runs: list[SyntheticRun], shots: Path) -> None:
        self.page, self.url, self.runs, self.shots = page, url, runs, shots

    def go(self, address: str) -> Page:
        """Loaded anew, with nothing remembered of the tests before."""
        self.page.open("about:blank")
        self.page.open(self.url)
        self.page.wait_for("#status span")
        self.page.js("(localStorage.clear(), sessionStorage.clear())")
        self.page.open("about:blank")
        self.page.open(f"{self.url}#/{address}")
        self.page.wait_for("#status span")
        self.page.wait_for(".indexing", 0)
        return self.page

    def shoot(self, name: str) -> None:
        assert name in SHOTS
        self.page.screenshot(self.shots / f"view-{name}.png")


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    first = SyntheticRun(folder / "grpo").write(24)
    first.write_step(24, extra=evil_records(first))
    second = SyntheticRun(folder / "maxrl", seed=1).write(25)
    shots = Path(os.environ.get("SCREENSHOTS") or tmp_path_factory.mktemp("shots"))
    command = [sys.executable, "-m", "torchtitan_rl.view", "--port", "0"]
    server = subprocess.Popen(
        [*command, first.folder, second.folder], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[0]
        with open_browser() as page:
            yield Opened(page, url, [first, second], ROOT / shots)
            assert page.problems == []
    finally:
        server.terminate()
        server.communicate()


def evil_records(run: SyntheticRun) -> list[dict]:
    """One that only has messages, and one with tokens."""
    record = run.record(24, 0, 0)
    talk = [{"role": EVIL, "content": EVIL}, {"role": "assistant", "content": EVIL}]
    changed = {"task": "evil", "group": EVIL, "messages": talk, "state": {EVIL: EVIL}}
    changed |= {"failure": EVIL, "status": "time_limit", "sequences": []}
    ids = run.tokenizer.encode(EVIL.replace("\ud800", "")).ids
    tokens = {"group": "evil/0", "sequences": [{"prompt_token_ids": [], "token_ids": ids}]}
    return [{**record, **changed}, {**record, **changed, **tokens}]


def only(opened: Opened, run: int = 0) -> None:
    """Show one of the two runs."""
    opened.page.click("#runs summary")
    opened.page.click(f"#runs .menu label:nth-child({2 - run}) input")
    opened.page.click("#runs summary")


def test_curves_are_drawn_and_a_metric_can_be_added(opened):
    page = opened.go("overview")
    only(opened)
    page.wait_for(".chart", 5)
    titles = ("Reward", "Accuracy", "Seconds of a step", "entropy/all/mean", "mismatch_kl/all/mean")
    assert set(page.each(".chart", "e.dataset.title")) == set(titles)
    labels = page.each("[data-title=Accuracy] .u-label")
    assert labels == ["step", "all", "calculator", "sum_digits", "held out"]
    for title in titles:
        assert inked(page, f"[data-title='{title}'] canvas") > 300
    opened.shoot("overview")
    page.choose("select[name=metric]", "time/step")
    page.wait_for("[data-title='time/step'] canvas")
    page.click("[data-title='time/step'] .close")
    page.wait_for(".chart", 5)


def inked(page: Page, selector: str) -> int:
    """Pixels of a canvas that have a strong colour, unlike axes and grid."""
    return page.js(
        f"(canvas => {{ const {{data}} = canvas.getContext('2d')"
        ".getImageData(0, 0, canvas.width, canvas.height); let count = 0;"
        "for (let i = 0; i < data.length; i += 4) { const rgb = [data[i], data[i+1], data[i+2]];"
        "  if (data[i+3] > 200 && Math.max(...rgb) - Math.min(...rgb) > 90) count++; }"
        f" return count; }})(document.querySelector({json.dumps(selector)}))"
    )


def test_two_runs_are_overlaid(opened):
    page = opened.go("overview")
    page.wait_for(".chart", 6)
    labels = set(page.each(".chart .u-label"))
    assert {"grpo · all", "maxrl · all", "maxrl · held out"} <= labels
    # Colour and dashes: a curve can be told from every other by its legend.
    for title in ("Reward", "Accuracy"):
        lines = page.each(f"[data-title={title}] .u-marker canvas", "e.toDataURL()")
        assert len(set(lines)) == len(lines) == len(page.each(f"[data-title={title}] .u-label")) - 1
    page.choose("select[name=task]", "calculator")
    page.wait("document.querySelector('.chart').textContent.includes('maxrl · calculator')")


def test_rollouts_are_filtered_sorted_searched_and_paged(opened):
    page = opened.go("rollouts")
    page.wait_for("tbody tr", 50)
    opened.shoot("rollouts")
    page.choose("select[name=task]", "calculator")
    page.wait_for("tbody tr", every="e.cells[1].textContent == 'calculator'")
    page.choose("select[name=correct]", "false")
    page.wait_for("tbody tr", every="e.querySelector('.bad') && e.innerText.includes('calculator')")
    page.click("button[type=button]")  # clear
    page.wait_for("select[name=task]", every="e.value == ''")
    page.wait_for("tbody tr", 50)
    page.click("th:nth-child(7) button")
    page.wait_for("th:nth-child(7)", every="e.ariaSort == 'descending'")
    page.wait_for("tbody tr", 50)
    rewards = page.each("tbody tr", "+e.cells[6].textContent")
    assert rewards == sorted(rewards, reverse=True)
    page.click(".paging button:nth-of-type(2)")
    page.wait("document.querySelector('.count')?.textContent.startsWith('51–100')")
    page.choose("input[name=text]", "the result is")
    page.wait("document.querySelector('.count')?.textContent.includes('found; searched')")
    assert "The result is" in page.text("td.preview")


def test_a_rollout_is_opened_and_its_tokens_coloured(opened):
    page = opened.go("rollouts?task=calculator&correct=false&split=train")
    page.wait_for("tbody tr")
    page.press("j")
    page.press("j")
    page.press("Enter")
    page.wait("document.querySelectorAll('.t').length > 50")
    speakers = page.each(".turn h3", "e.firstChild.data")
    assert speakers == ["prompt", "assistant", "tool", "assistant"]
    seen = {mode: colours(page, mode) for mode in page.each("[data-mode]", "e.dataset.mode")}
    assert len(seen) == 8
    for mode, found in seen.items():
        assert len(set(found)) >= 2, mode
    assert len({tuple(found) for found in seen.values()}) >= 7
    colours(page, "rl")
    [rl, echo] = [page.each(f".{who} .t", BACKGROUND)[1] for who in ("assistant", "environment")]
    assert len({rl, echo, "rgba(0, 0, 0, 0)"}) == 3
    colours(page, "token_logprobs")
    page.hover(".assistant .t:nth-child(3)")
    tip = page.text("#tip")
    for name in ("advantage", "trainer logprob", "ratio", "entropy", "policy version", "mask"):
        assert name in tip
    opened.shoot("tokens")
    facts = page.text("aside")
    for fact in ("exact", "policy version", "generate", "guesses", "Expected answer"):
        assert fact in facts


def colours(page: Page, mode: str) -> list[str]:
    page.click(f"[data-mode={mode}]")
    return page.each(".t", BACKGROUND)


def test_keys_go_through_the_list(opened):
    page = opened.go("rollouts?limit=2&sort=reward")
    page.click("tbody tr:nth-child(2) td")
    page.wait_for("aside")
    before = page.js("location.hash")
    page.press("j")  # beyond the two that were listed
    page.wait(f"document.querySelector('aside') && location.hash != {json.dumps(before)}")
    page.wait_for("aside")
    page.press("k")
    page.wait(f"document.querySelector('aside') && location.hash == {json.dumps(before)}")


def test_two_samples_of_a_group_are_compared(opened):
    page = opened.go("rollouts?task=calculator&step_max=16&split=train&correct=false")
    page.click("tbody tr td")
    page.click("#compare")
    page.wait("document.querySelectorAll('.pane .t').length > 20")
    keys = "[...document.querySelectorAll('.pane .chip.on')].map(e => e.dataset.key)"
    first, second = page.js(keys)
    assert first != second
    assert page.each(".verdict > span") == ["✗", "✓"]  # what can be learned from
    assert page.count(".t.differs") == 2
    opened.shoot("compare")
    page.click(".pane[data-side=b] .chip:not(.on)")
    page.wait(
        f"document.querySelectorAll('.pane .chip.on').length == 2 && ({keys})[1] != '{second}'"
    )
    assert page.js(keys)[0] == first
    assert len(set(colours(page, "rl"))) >= 2


def test_the_same_group_of_two_runs_is_compared(opened):
    page = opened.go("rollouts?task=calculator&split=train")
    page.click("tbody tr td")
    page.click(".compare-run")
    page.wait("document.querySelectorAll('.pane .t').length > 20")
    runs = page.each(".pane select", "e.value")
    assert runs == ["grpo", "maxrl"]
    prompts = page.each(".pane .prompt")
    assert prompts[0] == prompts[1]


def test_the_timeline_has_a_lane_a_thread(opened):
    page = opened.go("timeline")
    page.wait_for(".legend .swatch")
    assert page.js("document.querySelector('.legend').innerText.split('\\n').sort()") == [
        "generate",
        "grade",
        "sync",
        "train",
    ]
    assert inked(page, "canvas") > 2000
    opened.shoot("timeline")
    page.click(".bar button:nth-of-type(3)")  # +
    page.wait("+document.querySelector('main > p').textContent.split(' ')[0] < 150")


def test_a_colour_of_the_timeline_means_one_thing(opened):
    run = opened.runs[0]
    names = ["start", "say its step", "end", "cancel", "answer a probe", "measure", "respond"]
    names += ["publish weights", "pull weights", "save a checkpoint", "compute logprobs"]
    for number, name in enumerate([*names, "export the model"]):
        span = {"name": name, "ph": "X", "pid": 1, "tid": number % 4, "args": {}}
        run._event({**span, "ts": (run.clock + number) * 1e6, "dur": 1e6})
    page = opened.go("timeline")
    page.wait_for(".legend .swatch", 16)
    colours = page.each(".legend .swatch", BACKGROUND)
    assert len(set(colours)) == 16


def test_a_run_that_writes_no_more_says_so(opened):
    run = opened.runs[1]
    page = opened.go("overview")
    page.wait("document.querySelector('#status').textContent.includes('written just now')")
    then = time.time() - 12.5 * 60
    for path in run.folder.iterdir():
        os.utime(path, (then, then))
    page.wait(
        "[...document.querySelectorAll('#status span')].some(e => e.textContent =="
        " 'maxrl: 25 of 80 steps · 420 rollouts · last written 12 min ago')"
    )


def test_what_a_rollout_says_is_text_and_nothing_of_it_runs(opened):
    page = opened.go("rollouts?task=evil")
    page.wait_for("tbody tr", 2)
    assert SHOWN in page.text("td.preview")
    page.click("tbody tr td")
    page.wait_for(".conversation")
    for selector in (".conversation .text", "aside", ".turn h3"):
        assert "<script>window.ran = 1</script>" in page.text(selector)
        assert SHOWN in page.text(selector)
    assert page.count(".t") == 0  # no sequences: its messages are shown
    assert page.js("typeof window.ran") == "undefined"
    assert page.count("main script, main img") == 0


def test_tokens_are_text_too(opened):
    page = opened.go("rollouts?task=evil&group=evil/0")
    page.click("tbody tr td")
    said = page.text(".assistant .tokens")
    assert said.startswith("<script>window.ran = 1</script><img src=x")
    assert "␀␛[31m\\xe2\\x80\\xaeevil" in said  # bytes of a character that is no token by itself
    assert "\u202e" not in said
    page.click("[data-as=messages]")
    page.wait_for(".turn .text")
    assert page.count(".t") == 0
    assert page.js("typeof window.ran") == "undefined"
    assert page.count("main script, main img") == 0


def test_a_new_step_and_a_cut_line_show_without_a_reload(opened):
    first = opened.runs[0]
    page = opened.go("rollouts")
    page.wait("document.querySelector('tbody tr').cells[0].textContent == '24'")
    page.js("window.same = true")
    first.write_step(25)
    page.wait("document.querySelector('tbody tr').cells[0].textContent == '25'")
    page.wait("document.querySelector('#status').textContent.includes('grpo: 26 of 80 steps')")
    assert page.count(".broken") == 0
    record = json.dumps(first.record(26, 0, 0))
    path = first.folder / "rollouts/step-000026.jsonl"
    write_lines(path, [])
    path.write_text(f"{record}\n{record[:99]}")
    page.wait("document.querySelector('.broken')?.textContent == '1 broken line skipped'")
    page.wait("document.querySelector('tbody tr').cells[0].textContent == '26'")
    assert page.js("window.same")


def test_a_missing_browser_says_how_to_get_one(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("TORCHTITAN_RL_BROWSER", raising=False)
    with pytest.raises(BrowserMissing, match="apt-get install chromium"):
        find_browser()


@pytest.mark.parametrize("name", SHOTS)
def test_docs_have_the_screenshots(name):
    data = (ROOT / "docs" / f"view-{name}.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) < 200_000
