"""The page's server, asked over HTTP."""

import http.client
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

from tests.view.synthetic import SyntheticRun, write_lines
from torchtitan_rl.view.server import STATIC, host_is_ours, open_server, why_refused
from torchtitan_rl.view.viewer import Viewer


class Client:
    """A server in this process, whose index is brought up to date when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.viewer = Viewer([folder])
        self.server = open_server("127.0.0.1", 0, self.viewer.endpoints, self.viewer.changes)
        self.address = urlsplit(self.server.url).netloc
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def fetch(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.address)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, dict(answer.getheaders()), body

    def ask(self, name: str, **values: object) -> dict:
        status, _, body = self.fetch(f"/api/{name}?{urlencode({'run': 'run', **values})}")
        return {**json.loads(body), "http": status}

    def post(self, name: str, body: object, **headers: str) -> dict:
        """A change, as the page sends it unless the headers say otherwise."""
        page = {"Origin": f"http://{self.address}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(self.address)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", f"/api/{name}", data, headers={**page, **headers})
        answer = connection.getresponse()
        found = {**json.loads(answer.read()), "http": answer.status}
        connection.close()
        return found

    def update(self) -> None:
        self.viewer.index.add("run")
        self.viewer.index.update("run")

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        self.viewer.close()


@pytest.fixture
def run(tmp_path):
    return SyntheticRun(tmp_path / "run").write(6)


@pytest.fixture
def client(run):
    made = Client(run.folder)
    made.update()
    yield made
    made.close()


def test_only_what_is_new_is_sent(client, run):
    first = client.ask("status")
    assert [row["step"] for row in first["metrics"]] == list(range(6))
    assert first["metrics"][1]["mismatch_kl/all/mean"] is None  # NaN on disk
    assert (first["rollouts"], first["files_pending"]) == (6 * 16 + 2 * 4, 0)
    assert client.ask("status", cursor=first["cursor"])["metrics"] == []
    run.write_step(6)
    second = client.ask("status", cursor=first["cursor"])
    assert [row["step"] for row in second["metrics"]] == [6]
    client.update()
    assert client.ask("status")["rollouts"] == first["rollouts"] + 16


def test_a_cut_or_broken_line_is_counted_and_the_rest_is_read(client, run):
    path = run.folder / "rollouts/step-000005.jsonl"
    data = path.read_bytes()
    path.write_bytes(b"no json\n" + data[:-20])
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')
    client.update()
    status = client.ask("status")
    assert status["broken"]["rollouts"] == 2
    assert status["metrics_pending"]
    assert len(status["metrics"]) == 6
    assert client.ask("rollouts", step_min=5, split="train")["total"] == 15


def test_a_step_that_is_done_again_replaces_its_rollouts(client, run):
    record = {**run.record(5, 0, 0), "task": "again"}
    write_lines(run.folder / "rollouts/step-000005.jsonl", [record])
    (run.folder / "rollouts/step-000004.jsonl").unlink()
    client.update()
    page = client.ask("rollouts", step_min=4, split="train")
    assert [row["task"] for row in page["rows"]] == ["again"]
    assert client.ask("rollout", key=page["rows"][0]["key"])["task"] == "again"


def test_filters_and_order(client):
    every = client.ask("rollouts", limit=200)["rows"]
    for values, keep in (
        ({"task": "calculator"}, lambda r: r["task"] == "calculator"),
        ({"split": "evaluation"}, lambda r: r["split"] == "evaluation"),
        ({"status": "truncated"}, lambda r: r["status"] == "truncated"),
        ({"correct": "false"}, lambda r: not r["correct"]),
        ({"step_min": 2, "step_max": 3}, lambda r: 2 <= r["step"] <= 3),
        ({"reward_min": 1.15}, lambda r: r["reward"] >= 1.15),
        ({"text": "the RESULT"}, lambda r: "The result" in r["preview"]),
    ):
        page = client.ask("rollouts", limit=200, **values)
        wanted = {r["key"] for r in every if keep(r)}
        assert wanted
        assert {r["key"] for r in page["rows"]} == wanted
    for order in ("ascending", "descending"):
        rows = client.ask("rollouts", sort="advantage", order=order, limit=200)["rows"]
        values = [r["advantage"] for r in rows if r["advantage"] is not None]
        assert values == sorted(values, reverse=order == "descending")
        assert all(r["advantage"] is None for r in rows[len(values) :])


def test_pages_follow_one_another_without_gaps(client):
    keys, start = [], 0
    while start is not None:
        page = client.ask("rollouts", start=start, limit=30, sort="task")
        keys += [row["key"] for row in page["rows"]]
        start = page["next"]
    assert len(keys) == len(set(keys)) == page["total"]


def test_a_rollout_with_its_tokens_and_its_group(client):
    row = client.ask("rollouts", task="calculator", split="train")["rows"][0]
    rollout = client.ask("rollout", key=row["key"])
    [sequence] = rollout["sequences"]
    assert sequence["exported"]
    assert "calculator" in "".join(sequence["text"])
    assert [sample["sample"] for sample in rollout["samples"]] == [0, 1, 2, 3]
    group = client.ask("group", group=rollout["group"], step=99)
    assert group["samples"] == rollout["samples"]
    assert client.ask("group", group="no such")["samples"] == []


def test_spans_of_a_window(client):
    every = client.ask("timeline")
    lanes = {lane["name"]: lane["rows"] for lane in every["lanes"]}
    assert lanes == dict.fromkeys(("controller", "generator", "grader", "trainer"), 1)
    assert len(every["spans"]) == 6 * 8
    some = client.ask("timeline", start=1, end=2)
    assert some["spans"] == [s for s in every["spans"] if s[3] <= 2 and s[3] + s[4] >= 1]


def test_calls_at_the_same_time_share_the_lane_of_their_actor(client, run):
    """Calls of a resumed run, which is another process, share the lane too."""
    for pid, tid, name in ((1, 9, "generator (2)"), (1, 7, "generator (40)"), (2, 0, "generator")):
        thread = {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        run._event(thread)
        span = {"name": "generate", "ph": "X", "pid": pid, "tid": tid, "ts": 100e6 + tid, "dur": 1}
        run._event({**span, "args": {"step": 6}})
    client.update()
    found = client.ask("timeline")
    names = [lane["name"] for lane in found["lanes"]]
    assert sorted(names) == ["controller", "generator", "grader", "trainer"]
    assert {lane["name"]: lane["rows"] for lane in found["lanes"]}["generator"] == 40
    late = [span for span in found["spans"] if span[3] >= 100]
    assert {span[0] for span in late} == {names.index("generator")}
    assert sorted(span[1] for span in late) == [0, 1, 39]


def test_rows_of_the_table_have_question_and_expected_answer(client):
    for row in client.ask("rollouts", task="calculator", limit=5)["rows"]:
        a, b = row["question"].removeprefix("What is ").removesuffix("?").split(" times ")
        assert row["expected_answer"] == str(int(a) * int(b))
        assert row["preview"].startswith("The result is")


def test_settings_have_the_names_of_the_command_line(client, run):
    first = client.ask("status")
    assert first["config"] == {"steps": "80", "seed": "0", "trainer.optimizer.lr": "0.0001"}
    known = {"config_version": first["config_version"]}
    assert client.ask("status", **known)["config"] is None
    (run.folder / "config.json").write_text(json.dumps({"steps": 90}))  # as a resumed run may
    assert client.ask("status", **known)["config"] == {"steps": "90"}


def test_notes_are_kept_in_the_folder_of_the_run(client, run):
    file = run.folder / "notes.md"
    assert client.ask("status")["notes"] == {"text": "", "version": "", "problem": ""}
    first = client.post("notes", {"run": "run", "text": "läuft\n<b>", "version": ""})
    assert (first["http"], file.read_text()) == (200, "läuft\n<b>")
    assert client.ask("status")["notes"]["text"] == "läuft\n<b>"
    lost = client.post("notes", {"run": "run", "text": "other", "version": ""})
    assert lost["http"] == 400
    assert "has changed since" in lost["error"]
    assert file.read_text() == "läuft\n<b>"
    client.post("notes", {"run": "run", "text": "", "version": first["version"]})
    assert not file.exists()
    assert not list(run.folder.glob(".notes*"))


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"Origin": "https://evil.example"}, None),
        ({"Origin": "http://localhost:1"}, None),
        ({"Origin": "null"}, None),
        ({"Origin": ""}, None),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, None),
        ({"Sec-Fetch-Site": "cross-site"}, None),
        ({"Sec-Fetch-Site": "same-site"}, None),
        ({"Content-Type": "text/plain"}, None),
        ({"Content-Type": "application/x-www-form-urlencoded"}, b"run=run&text=x&version="),
        ({}, b"["),
        ({}, b"[" * 100_000),
        ({}, {"run": "run", "text": 1, "version": ""}),
        ({}, {"run": "run", "text": "x" * 20_001, "version": ""}),
        ({}, {"run": "run", "text": "\ud800", "version": ""}),
        ({}, {"run": "../run", "text": "x", "version": ""}),
        ({"Content-Length": "-1"}, b"{}"),
    ],
)
def test_no_other_page_can_write_notes(client, run, headers, body):
    values = {"run": "run", "text": "x", "version": ""} if body is None else body
    found = client.post("notes", values, **headers)
    assert found["http"] in (400, 403, 404)
    assert found["error"]
    assert not (run.folder / "notes.md").exists()


def test_a_browser_that_asks_first_gets_no_leave(client):
    """What a page of another site would need, before it may send JSON here."""
    connection = http.client.HTTPConnection(client.address)
    headers = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    connection.request("OPTIONS", "/api/notes", headers=headers)
    answer = connection.getresponse()
    assert answer.status == 501
    assert not any(name.lower().startswith("access-control") for name in answer.headers)
    connection.close()


def test_notes_are_changed_on_this_machine_only():
    page = {"Host": "gpu-box:1", "Origin": "http://gpu-box:1", "Content-Type": "application/json"}
    assert why_refused(page, "127.0.0.1") == why_refused(page, "::1") == ""
    assert "only on the machine" in why_refused(page, "10.1.2.3")


@pytest.mark.parametrize("data", [b"\xff", b"x" * 20_001])
def test_notes_that_the_page_cannot_hold_are_not_overwritten(client, run, data):
    file = run.folder / "notes.md"
    file.write_bytes(data)
    notes = client.ask("status")["notes"]
    assert "use an editor" in notes["problem"]
    found = client.post("notes", {"run": "run", "text": "x", "version": notes["version"]})
    assert (found["http"], found["error"]) == (400, notes["problem"])
    assert file.read_bytes() == data


def test_a_link_is_replaced_and_not_followed(client, run, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (run.folder / "notes.md").symlink_to(elsewhere)
    version = client.ask("status")["notes"]["version"]
    assert client.post("notes", {"run": "run", "text": "x", "version": version})["http"] == 200
    assert (elsewhere.read_text(), (run.folder / "notes.md").read_text()) == ("mine", "x")


@pytest.mark.parametrize(
    "values", [{}, {"reward_parts": [1]}, {"sequences": [3, {"token_ids": "x"}]}]
)
def test_a_dropped_or_odd_rollout_can_be_shown(client, run, values):
    record = {"split": "discarded", "status": "failed", "failure": "it died", "reward": None}
    write_lines(run.folder / "rollouts/step-000099.jsonl", [{**record, **values}])
    client.update()
    [row] = client.ask("rollouts", split="discarded")["rows"]
    assert (row["step"], row["preview"]) == (99, "it died")
    assert client.ask("rollout", key=row["key"])["http"] == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/../../../../etc/passwd", 404),
        ("/%2e%2e/%2e%2e/etc/passwd", 404),
        ("/uplot/../../server.py", 404),
        ("/server.py", 404),
        ("/api/nothing", 404),
        ("/api/status?run=..", 404),
        ("/api/rollout?run=run&key=../config.json:0", 404),
        ("/api/rollouts?run=run&sort=1", 400),
        ("/api/timeline?run=run&start=x", 400),
        ("/", 200),
    ],
)
def test_nothing_but_the_page_is_served(client, path, status):
    found, headers, body = client.fetch(path)
    assert found == status
    assert b"root:" not in body
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_a_foreign_name_for_this_machine_is_refused(client):
    assert client.fetch("/api/status?run=run", Host="evil.example")[0] == 403
    assert (
        client.fetch("/api/status?run=run", Host=f"localhost:{client.server.server_port}")[0] == 200
    )


@pytest.mark.parametrize(
    ("header", "ours"),
    [
        ("127.0.0.1:1", True),
        ("[::1]:80", True),
        ("localhost", True),
        ("10.1.2.3:8765", True),
        ("gpu-box", True),
        ("localhost.evil.example", False),
        ("evil.example:8765", False),
        ("127.0.0.1.evil.example", False),
        ("[", False),
        ("", False),
        (None, False),
    ],
)
def test_whose_name_a_host_is(header, ours):
    assert host_is_ours(header, "gpu-box") == ours


def test_the_next_free_port_is_taken(client):
    other = open_server("127.0.0.1", client.server.server_port, {})
    assert other.server_port > client.server.server_port
    other.server_close()


def test_a_port_that_was_asked_for_and_is_in_use_is_an_error(client, run):
    port = client.server.server_port
    process = start(str(run.folder), "--port", str(port))
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert err == (
        f"error: 127.0.0.1:{port} is in use by another program: choose another --port, or leave it "
        "out\n"
    )


def start(*arguments: str, **more) -> subprocess.Popen:
    command = [sys.executable, "-m", "torchtitan_rl.view", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, cwd=Path(__file__).parents[2], **pipes, **more)


def test_the_command_says_where_it_is_and_ends_quietly(run, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = start(str(run.folder), "--port", "0", env={**os.environ, "TMPDIR": str(temporary)})
    assert process.stdout is not None
    url = process.stdout.readline().split()[0]
    assert url.startswith("http://127.0.0.1:")
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("GET", "/api/runs")
    assert json.loads(connection.getresponse().read()) == {"runs": ["run"], "chosen": ["run"]}
    connection.close()
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert list(temporary.iterdir())
    process.send_signal(2)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out.strip(), err) == (0, "", "")
    assert not list(temporary.iterdir())


def test_a_folder_that_is_no_run_is_an_error(tmp_path):
    process = start(str(tmp_path))
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert err.startswith(f"error: {tmp_path} is no run")


def test_the_index_follows_on_its_own_thread(run):
    client = Client(run.folder)
    client.viewer.start()
    client.ask("status")
    while client.ask("status")["rollouts"] < 104:
        time.sleep(0.02)
    client.close()


def test_the_pages_files_are_short_and_write_no_html():
    files = [path for path in STATIC.iterdir() if path.suffix in (".js", ".css", ".html")]
    assert len(files) > 10
    for path in files:
        source = path.read_text()
        assert len(source.splitlines()) <= 400, path.name
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in source, (path.name, word)
        assert "http://" not in source
        assert "https://" not in source
