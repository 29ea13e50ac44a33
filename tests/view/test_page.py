"""The page in a real browser, on runs that go on while it is open."""

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
SHOTS = ("overview", "runs", "rollouts", "tokens", "compare", "timeline")
TITLE = "e.dataset.title"
BACKGROUND = "getComputedStyle(e).backgroundColor"
EVIL = (
    "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'>"
    "\x00\x1b[31m\u202eevil\u200b\ud800 &lt;b&gt;"
)
SHOWN = "␀␛[31m⟨U+202E⟩evil⟨U+200B⟩\\ud800 &lt;b&gt;"


class Opened:
    """Two runs, their server and a browser."""

    def __init__(self, page: Page, url: str, runs: list[SyntheticRun]) -> None:
        self.page, self.url, self.runs = page, url, runs

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


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outputs")
    first = SyntheticRun(folder / "grpo").write(24)
    first.write_step(24, extra=evil_records(first))
    second = SyntheticRun(folder / "maxrl", seed=1).write(25)
    command = [sys.executable, "-m", "torchtitan_rl.view", "--port", "0"]
    server = subprocess.Popen(
        [*command, first.folder, second.folder], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[0]
        with open_browser() as page:
            yield Opened(page, url, [first, second])
            assert page.problems == []
    finally:
        server.terminate()
        server.communicate()


def evil_records(run: SyntheticRun) -> list[dict]:
    """Two records with harmful text: one that only has messages, and one with tokens."""
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


def test_curves_are_drawn_and_a_chart_can_be_removed_and_added(opened):
    page = opened.go("overview")
    only(opened)
    titles = ["Reward", "Accuracy", "Seconds of a step", "Truncated at max_tokens"]
    titles += ["Completion length", "Entropy", "Gradient norm"]
    titles += ["Share of the gradient", "KL", "Echo", "Tool calls"]
    page.wait_for("[data-title='Seconds of a step']", 1)  # that of one run alone
    page.wait_for(".chart", len(titles))
    by_order = "+getComputedStyle(e).order"
    placed = dict(zip(page.each(".chart", by_order), page.each(".chart", TITLE), strict=True))
    assert [placed[place] for place in sorted(placed)] == titles
    labels = page.each("[data-title=Accuracy] .u-label")
    assert labels == ["step", "all", "calculator", "sum_digits", "held out"]
    assert page.each("[data-title='Tool calls'] .u-label") == ["step", "ok", "malformed call"]
    for title in titles:
        assert inked(page, f"[data-title='{title}'] canvas") > 300
    page.choose("select[name=metric]", "time/step")
    page.wait_for("[data-title='time/step'] canvas")
    page.click("[data-title='time/step'] .close")
    page.wait_for(".chart", len(titles))
    page.click("[data-title=Entropy] .close")
    page.wait_for("[data-title=Entropy]", 0)
    page.choose("select[name=metric]", "entropy")
    page.wait_for("[data-title=Entropy] canvas")


def test_legends_have_the_latest_values_until_the_pointer_is_in_a_chart(opened):
    page = opened.go("overview")
    only(opened)
    page.wait_for(".chart .u-value")
    last = json.loads((opened.runs[0].folder / "metrics.jsonl").read_text().splitlines()[-1])
    values = "[data-title='Gradient norm'] .u-value"
    page.wait(f"document.querySelector({json.dumps(values)}).textContent == 'latest'")
    assert float(page.each(values)[1]) == pytest.approx(last["train/grad_norm"], rel=1e-3)
    assert "–" not in "".join(page.each(".chart .u-value"))
    page.hover("[data-title='Gradient norm'] .u-over")
    page.wait(f"/^\\d+$/.test(document.querySelector({json.dumps(values)}).textContent)")
    page.hover("h2")
    page.wait(f"document.querySelector({json.dumps(values)}).textContent == 'latest'")


RANGES = {
    "axisRange(0, 0)": [0, 1],  # a policy_age of zeros
    "axisRange(null, null)": [0, 1],
    "axisRange(2, 2)": [0, 4],
    "axisRange(-3, -3)": [-6, 0],
    "axisRange(0, 100)": [0, 106],
    "axisRange(-100, 0)": [-106, 0],
    "axisRange(50, 100)": [47, 103],
    "axisRange(1, 1 + 1e-15)": [0, 2],
    "stepRange(3, 3)": [2.5, 3.5],
    "stepRange(0, 9)": [0, 9],
}


def test_axes_fit_their_values(opened):
    page = opened.go("overview")
    for call, expected in RANGES.items():
        found = page.js(
            f"import(new URL('charts.js', document.baseURI).href).then(charts => charts.{call})"
        )
        assert found == pytest.approx(expected), call


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
    page.wait_for(".chart", 12)
    labels = set(page.each(".chart .u-label"))
    assert page.each("[data-title=Entropy] .u-label") == ["step", "grpo", "maxrl"]
    assert {"grpo", "maxrl", "maxrl · held out"} <= labels
    # Colour and dashes: a curve can be told from every other by its legend.
    for title in ("Reward", "Accuracy"):
        lines = page.each(f"[data-title={title}] .u-marker canvas", "e.toDataURL()")
        assert len(set(lines)) == len(lines) == len(page.each(f"[data-title={title}] .u-label")) - 1
    page.choose("select[name=task]", "calculator")
    accuracy = "document.querySelector('[data-title=Accuracy]').textContent"
    page.wait(f"{accuracy}.includes('maxrl · calculator')")


def test_a_phase_has_one_colour_in_all_charts(opened):
    page = opened.go("overview")
    page.wait_for("[data-title^='Seconds of a step']", 2)
    # A run may have phases that the other has not; that must not shift the colours of the rest.
    for run, row in (
        (opened.runs[0], {"step": 24, "time/compile": 0.1}),
        (opened.runs[1], {"step": 25, "time/evaluate": 0.4, "time/compile": 0.2}),
    ):
        with (run.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    chart = "[data-title='Seconds of a step: {}'] .u-series:not(:first-child)"
    page.wait_for(chart.format("grpo"), 5)
    page.wait_for(chart.format("maxrl"), 6)
    seen = {
        name: dict(
            page.each(
                chart.format(name),
                "[e.querySelector('.u-label').textContent,"
                " getComputedStyle(e.querySelector('.u-marker')).borderColor]",
            )
        )
        for name in ("grpo", "maxrl")
    }
    assert len(set(seen["maxrl"].values())) == 6
    assert seen["grpo"].items() <= seen["maxrl"].items()


def test_each_run_has_a_line_of_status_that_is_seen_whole(opened):
    page = opened.go("overview")
    for width in (1280, 390):
        page.resize(width, 800)
        page.wait_for("#status .line", 2)
        assert page.each("#status .line b") == ["grpo", "maxrl"]
        assert all(page.each("#status .line > *", "e.scrollWidth <= e.clientWidth + 1"))
        tops = page.each("#status .line", "e.getBoundingClientRect().top")
        bottom = page.js("document.querySelector('header').getBoundingClientRect().bottom")
        assert bottom <= tops[0] < tops[1]
    page.resize(1280, 720)


def test_settings_that_differ_are_listed(opened):
    page = opened.go("overview")
    page.wait_for(".differing tbody tr", 1)
    assert page.each(".differing tbody tr *") == ["seed", "0", "1"]
    assert page.each(".differing thead th") == ["setting", "grpo", "maxrl"]
    page.click("details.config summary")
    page.wait_for("details.config tbody tr", 3)
    page.js(
        "(e => { e.value = 'LR'; e.dispatchEvent(new Event('input')); })"
        "(document.querySelector('details.config input'))"
    )
    shown = "[...document.querySelectorAll('details.config tbody tr')].filter(e => !e.hidden)"
    assert page.js(f"{shown}.map(e => e.dataset.name)") == ["trainer.optimizer.lr"]


def test_notes_are_written_saved_and_never_overwrite_others(opened):
    page, file = opened.go("overview"), opened.runs[0].folder / "notes.md"
    card = "[data-run=grpo].note"
    page.wait_for(f"{card} .edit")
    page.click(f"{card} .edit")
    page.choose(f"{card} textarea", "lr too high\n<script>window.ran = 1</script>")
    page.click(f"{card} .save")
    page.wait_for(f"{card} .text")
    assert file.read_text() == "lr too high\n<script>window.ran = 1</script>"
    assert page.text(f"{card} .text") == file.read_text()
    page.click(f"{card} .edit")
    page.choose(f"{card} textarea", "mine")
    file.write_text("theirs")
    page.click(f"{card} .save")
    page.wait(f"document.querySelector('{card} [role=alert]').textContent.includes('has changed')")
    assert file.read_text() == "theirs"
    assert page.js(f"document.querySelector('{card} textarea').value") == "mine"
    page.problems.clear()  # Chromium logs a refused request
    page.press("Escape")
    page.wait(f"document.querySelector('{card} .text')?.textContent == 'theirs'")
    file.unlink()
    page.wait_for(f"{card} .text", 0)


VIEWS = ["overview", "rollouts", "timeline", "rollout", "compare"]


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_shows_the_page_without_scrolling_sideways(opened, view):
    page = opened.page
    page.resize(390, 844, phone=True)
    try:
        opened.go("rollouts?task=calculator&split=train" if view in VIEWS[3:] else view)
        if view in VIEWS[3:]:
            page.click("tbody tr td")
            page.wait_for(".turn")
        if view == "compare":
            page.click("#compare")
            page.wait_for(".pane .turn")
        page.wait_for("main canvas, main .turn, main tbody tr")
        page.wait("document.documentElement.scrollWidth == 390")
        page.wait(f"{TOO_WIDE}.length == 0")
        header = page.js("document.querySelector('header').getBoundingClientRect().height")
        assert header < 90
    finally:
        page.resize(1280, 720)


TOO_WIDE = (
    "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > 391"
    " || e.getBoundingClientRect().left < -1).map(e => e.outerHTML.slice(0, 200))"
)


def test_on_a_phone_a_row_of_the_table_is_a_card(opened):
    page = opened.page
    page.resize(390, 844, phone=True)
    try:
        opened.go("rollouts?task=calculator&split=train")
        page.wait_for("tbody tr", 50)
        for name in ("question", "preview", "expected_answer", "reward"):
            boxes = page.each(f"td[data-column={name}]", "e.getBoundingClientRect().toJSON()")
            assert all(box["width"] > 10 and box["right"] <= 391 for box in boxes)
        page.choose("select[name=sort]", "reward ascending")
        page.wait("location.hash.includes('order=ascending')")
        page.wait_for("tbody tr", 50)
        rewards = page.each("td[data-column=reward]", "+e.textContent")
        assert rewards == sorted(rewards)
    finally:
        page.resize(1280, 720)


def test_rollouts_are_filtered_sorted_searched_and_paged(opened):
    page = opened.go("rollouts")
    page.wait_for("tbody tr", 50)
    page.choose("select[name=task]", "calculator")
    page.wait_for("tbody tr", every="e.cells[1].textContent == 'calculator'")
    assert page.text("td[data-column=question]").startswith("What is ")
    assert page.text("td[data-column=expected_answer]").isdigit()
    page.choose("select[name=correct]", "false")
    page.wait_for("tbody tr", every="e.querySelector('.bad') && e.innerText.includes('calculator')")
    page.click("button[type=button]")  # clear filters
    page.wait_for("select[name=task]", every="e.value == ''")
    page.wait_for("tbody tr", 50)
    page.click("th[data-column=reward] button")
    page.wait_for("th[data-column=reward]", every="e.ariaSort == 'descending'")
    page.wait_for("tbody tr", 50)
    rewards = page.each("td[data-column=reward]", "+e.textContent")
    assert rewards == sorted(rewards, reverse=True)
    page.click(".paging button:nth-of-type(2)")
    page.wait("document.querySelector('.count')?.textContent.startsWith('51–100')")
    page.choose("input[name=text]", "the result is")
    page.wait("document.querySelector('.count')?.textContent.includes(' found in ')")
    assert "The result is" in page.text("td[data-column=preview]")
    page.click(".picker summary")
    page.click("input[name=column_turns]")
    page.wait_for("td[data-column=turns]", every="e.textContent == '2'")


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


def test_the_timeline_has_a_lane_for_each_actor(opened):
    page = opened.go("timeline")
    page.wait_for(".legend .swatch")
    assert page.js("document.querySelector('.legend').innerText.split('\\n').sort()") == [
        "generate",
        "grade",
        "pull weights",
        "train",
    ]
    assert inked(page, "canvas") > 2000
    page.click(".bar button:nth-of-type(3)")  # zoom in
    page.wait("+document.querySelector('main > p').textContent.match(/all (\\d+)/)[1] < 150")


def test_calls_at_the_same_time_make_their_lane_higher_and_not_more_lanes(opened):
    run, page = opened.runs[0], opened.go("timeline")
    page.wait_for(".legend .swatch")
    before = page.js("document.querySelector('canvas').clientHeight")
    for row in range(2, 65):
        thread = {"name": "thread_name", "ph": "M", "pid": 1, "tid": 100 + row}
        run._event({**thread, "args": {"name": f"generator ({row})"}})
        span = {"name": "generate", "ph": "X", "pid": 1, "tid": 100 + row, "args": {"step": 1}}
        run._event({**span, "ts": 1e6, "dur": run.clock * 0.9e6})
    page.wait(f"document.querySelector('canvas').clientHeight > {before}")
    assert page.js("document.querySelector('canvas').clientHeight") < before + 120


def test_a_colour_of_the_timeline_means_one_thing(opened):
    run = opened.runs[0]
    names = ["start", "say its step", "end", "cancel", "answer a probe", "measure", "respond"]
    names += ["publish weights", "pull weights", "save a checkpoint", "compute logprobs"]
    for number, name in enumerate([*names, "export the model"]):
        span = {"name": name, "ph": "X", "pid": 1, "tid": number % 4, "args": {}}
        run._event({**span, "ts": (run.clock + number) * 1e6, "dur": 1e6})
    page = opened.go("timeline")
    page.wait_for(".legend .swatch", 15)
    colours = page.each(".legend .swatch", BACKGROUND)
    assert len(set(colours)) == 15


def test_a_run_that_writes_no_more_says_so(opened):
    run = opened.runs[1]
    page = opened.go("overview")
    page.wait("document.querySelector('#status').textContent.includes('last written just now')")
    then = time.time() - 12.5 * 60
    for path in run.folder.iterdir():
        os.utime(path, (then, then))
    page.wait(
        "document.querySelector('#status [data-run=maxrl] span').textContent =="
        " '25 of 80 steps · 420 rollouts · last written 12 min ago'"
    )


def test_what_a_rollout_says_is_text_and_nothing_of_it_runs(opened):
    page = opened.go("rollouts?task=evil")
    page.wait_for("tbody tr", 2)
    assert SHOWN in page.text("td[data-column=preview]")
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
    page.wait("document.querySelector('#status').textContent.includes('26 of 80 steps')")
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
