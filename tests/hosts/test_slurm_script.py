"""Slurm's launcher without Slurm: the script's text, and what it does when stand-ins answer."""

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

from torchtitan_rl.cli.main import main
from torchtitan_rl.cli.submit import for_the_job
from torchtitan_rl.config.cluster import SlurmConfig
from torchtitan_rl.hosts.launchers.slurm import (
    SlurmNode,
    nodes_of_allocation,
    why_task_gone,
    worker_command,
)
from torchtitan_rl.hosts.launchers.slurm_batch import (
    batch_script,
    log_file,
    submit,
    submit_run,
)
from torchtitan_rl.hosts.launchers.slurm_commands import SlurmError


def made(tmp_path: Path, job: SlurmConfig | None = None, *arguments: str, **options) -> str:
    options = {"run_name": "run", "output_dir": tmp_path / "outputs", **options}
    return batch_script(job or SlurmConfig(nodes=1), ["--config", "mine", *arguments], **options)


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.split("\n") if "#SBATCH" in line]


# ---- text ---------------------------------------------------------------------------------------

ALWAYS = ["--ntasks-per-node=1", "--requeue", "--signal=B:TERM@300", "--open-mode=append"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["--nodes=1"]),
        (
            {"nodes": 4, "partition": "gpu", "account": "me", "qos": "high", "time": "1-12"},
            ["--nodes=4", "--partition=gpu", "--account=me", "--qos=high", "--time=1-12"],
        ),
        (
            {"gpus_per_node": 8, "cpus_per_task": 96, "mem": "0"},
            ["--nodes=1", "--gpus-per-node=8", "--cpus-per-task=96", "--mem=0"],
        ),
        (
            {"args": ("--constraint=h100&ib", '--comment=a "b" # \\c', "--exclusive")},
            ["--nodes=1", '--constraint="h100&ib"', r'--comment="a \"b\" # \\c"', "--exclusive"],
        ),
    ],
)
def test_settings_are_options_of_sbatch(tmp_path, settings, expected):
    first, *options, output = directives(made(tmp_path, SlurmConfig(**{"nodes": 1, **settings})))
    assert first == "--job-name=run"
    assert options == [*expected, *ALWAYS]
    assert output == f"--output={tmp_path}/outputs/run/slurm.log"


@pytest.mark.parametrize(
    ("run_name", "output_dir"),
    [("run", "outputs"), ("sweep/lr 1e-5", "it's 50%"), ("a", '$(echo "no") `no` # \\')],
)
def test_any_name_is_quoted_where_bash_reads_it(tmp_path, run_name, output_dir):
    odd = ["--task.instructions", 'it\'s "$HOME" `no` \\ é']
    script = made(tmp_path, None, *odd, run_name=run_name, output_dir=tmp_path / output_dir)
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    line = next(line for line in script.split("\n") if line.startswith("arguments=("))
    words = shlex.split(line.removeprefix("arguments=(").removesuffix(")"))
    expected = [*odd, "--output_dir", str(tmp_path / output_dir), "--run_name", run_name]
    assert words == ["--config", "mine", *expected]
    said = subprocess.run(
        ["bash", "-c", f"{line}\nprintf '%s\\0' \"${{arguments[@]}}\""], capture_output=True
    )
    assert said.stdout.decode().split("\0")[:-1] == words


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: made(p, SlurmConfig()), "cluster.slurm.nodes is 0"),
        (lambda p: SlurmConfig(nodes=-1), "slurm.nodes must not be negative; got -1"),
        (lambda p: SlurmConfig(gpus_per_node=-1), "gpus_per_node must not be negative"),
        (lambda p: SlurmConfig(signal_seconds=0), "signal_seconds must be 1 to 65535; got 0"),
        (lambda p: SlurmConfig(args=("-C", "h100")), "'h100', which is no option of sbatch"),
        (lambda p: made(p, None, "--resume"), "--resume is set by the batch script"),
        (lambda p: made(p, None, "--run_name=x"), "--run_name=x is set by the batch script"),
        (lambda p: made(p, run_name=""), "run_name is empty"),
        (lambda p: made(p, None, "a\nb"), "'a\\nb' has a line break"),
        (lambda p: made(p, SlurmConfig(nodes=1, mem="1G\n#SBATCH x")), "has a line break"),
    ],
)
def test_what_a_script_cannot_say_is_an_error(tmp_path, make, message):
    with pytest.raises((SlurmError, ValueError)) as error:
        make(tmp_path)
    assert message in str(error.value)


# ---- what it does -------------------------------------------------------------------------------

PYTHON = """\
#!/bin/bash
# A training command: -m torchtitan_rl.train ...
told=0
trap 'told=$((told + 1)); echo TERM >> train.log' TERM
echo "$@" >> train.log
if [ -e exits ]; then exit "$(cat exits)"; fi
touch begun
while [ $told = 0 ] && [ ! -e done ]; do sleep 0.02; done
sleep 0.2
exit "$(cat code)"
"""

SCONTROL = """\
#!/bin/bash
echo "scontrol $*" >> scontrol.log
case "$1 $2" in
  "show job")
    state=$(head -1 states); [ "$(wc -l < states)" -gt 1 ] && sed -i 1d states
    echo "JobId=7 JobName=JobState=FAKE JobState=$state Reason=None" ;;
  "show config") echo "ProctrackType           = proctrack/$(cat proctrack)" ;;
  "requeue 7") [ ! -e refuses ] || exit 1; kill -TERM "$PPID" ;;
esac
"""


class Shell:
    """A batch script that runs in a folder where stand-ins answer it."""

    def __init__(self, folder: Path, *, states: str = "RUNNING", code: int = 130, **files: str):
        self.folder = folder
        for name, text in (("python", PYTHON), ("scontrol", SCONTROL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        files = {"states": states.replace(" ", "\n"), "code": str(code), **files}
        for name, text in ({"proctrack": "cgroup"} | files).items():
            (folder / name).write_text(f"{text}\n")
        self.script = folder / "script.sh"
        self.script.write_text(made(folder, folder=folder, python=str(folder / "python")))
        (folder / "outputs" / "run").mkdir(parents=True, exist_ok=True)

    def start(self) -> "subprocess.Popen[str]":
        environment = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
        }
        return subprocess.Popen(
            ["bash", str(self.script)], env=environment, stdout=subprocess.PIPE, text=True
        )

    def told(self) -> tuple[int, str]:
        """Send SIGTERM to the script twice, as Slurm does; returns its exit code and words."""
        process = self.start()
        while not (self.folder / "begun").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        log = self.folder / "train.log"
        while "TERM" not in log.read_text() and process.poll() is None:
            if "scontrol show config" in self.asked() and not self.passes():
                (self.folder / "done").touch()  # Slurm has told it
                break
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=20)[0]
        return process.returncode, said

    def passes(self) -> bool:
        return (self.folder / "proctrack").read_text() == "cgroup\n"

    def asked(self) -> str:
        log = self.folder / "scontrol.log"
        return log.read_text() if log.exists() else ""


@pytest.mark.parametrize(
    ("how", "code", "again", "told"),
    [
        ({}, -signal.SIGTERM, True, 1),  # the time limit is near, or preemption
        ({"code": 143}, -signal.SIGTERM, True, 1),  # the command had not begun
        ({"code": 0}, 0, False, 1),  # it was done just then
        ({"code": 1}, 1, False, 1),
        ({"states": "COMPLETING"}, 130, False, 1),  # scancel
        ({"states": "COMPLETING", "proctrack": "linuxproc"}, 130, False, 0),  # Slurm tells it
        ({"states": "RUNNING COMPLETING"}, 130, False, 1),  # scancel while it saves
        ({"states": "", "code": 130}, 130, False, 1),  # Slurm's controller does not answer
        ({"refuses": "yes"}, 130, True, 1),
    ],
)
def test_only_a_run_that_was_told_to_stop_is_queued_again(tmp_path, how, code, again, told):
    shell = Shell(tmp_path, **how)
    returned, said = shell.told()
    assert returned == code, said
    assert ("scontrol requeue 7" in shell.asked()) == again
    assert (tmp_path / "train.log").read_text().count("TERM") == told
    assert ("submit it again to go on" in said) == (
        code == 130 and how.get("states") != "COMPLETING"
    )


@pytest.mark.parametrize("code", [0, 1, 130])
def test_a_run_that_ends_by_itself_ends_the_job_with_its_exit_code(tmp_path, code):
    process = Shell(tmp_path, exits=str(code)).start()
    said = process.communicate(timeout=20)[0]
    assert process.returncode == code
    assert said == "job 7, start 1, on n[1-2]\n"


def test_a_run_that_is_there_is_resumed(tmp_path):
    shell = Shell(tmp_path, exits="0")
    for _ in range(2):
        process = shell.start()
        process.communicate(timeout=20)
        assert process.returncode == 0
        (tmp_path / "outputs" / "run" / "config.json").touch()
    first, second = (tmp_path / "train.log").read_text().splitlines()
    assert second == f"{first} --resume"


# ---- sbatch and allocations ---------------------------------------------------------------------


def stand_in(folder: Path, name: str, text: str) -> dict[str, str]:
    """Environment in which a command is a shell script."""
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]"}


def test_the_number_of_a_submitted_job_is_what_sbatch_prints(tmp_path):
    text = f"cat > {tmp_path}/given; echo 'sbatch: a remark' >&2; echo '17;cluster'"
    assert submit("#!/bin/sh\n", environment=stand_in(tmp_path, "sbatch", text)) == 17
    assert (tmp_path / "given").read_text() == "#!/bin/sh\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "echo 'sbatch: error: invalid partition: x' >&2; exit 1",
            "code 1: sbatch: error: invalid",
        ),
        ("echo hello", "sbatch answered 'hello\\n', which has no job number"),
    ],
)
def test_what_sbatch_refuses_is_said_in_its_words(tmp_path, text, message):
    with pytest.raises(SlurmError) as error:
        submit("", environment=stand_in(tmp_path, "sbatch", text))
    assert message in str(error.value)


def test_without_slurm_the_error_says_where_it_would_be(tmp_path):
    with pytest.raises(SlurmError, match=r"sbatch was not found: .* --hosts"):
        submit("", environment={"PATH": str(tmp_path)})
    with pytest.raises(SlurmError, match="SLURM_JOB_NODELIST is not set"):
        nodes_of_allocation({"PATH": str(tmp_path)})


NODES = """\
case "$2" in
  hostnames) printf 'n1\\nn2\\nn3\\n' ;;
  node)
    echo 'NodeName=n2 Arch=x86_64 NodeAddr=10.0.0.2 NodeHostName=n2 Version=22.05.8'
    echo 'NodeName=n1 Arch=x86_64 NodeAddr=n1 NodeHostName=n1 Version=22.05.8' ;;
esac"""


def test_nodes_have_the_addresses_that_slurm_knows(tmp_path):
    nodes = nodes_of_allocation(stand_in(tmp_path, "scontrol", NODES))
    assert nodes == [SlurmNode("n1", "n1"), SlurmNode("n2", "10.0.0.2"), SlurmNode("n3", "n3")]


SHOW = "import json, signal, sys; ignored = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN; "
SHOW += "print(json.dumps([ignored, *sys.argv[1:]]))"


@pytest.mark.parametrize(("node", "address"), [("n1", "n1:7000"), ("n2", "10.0.0.2:7000")])
def test_a_worker_knows_its_node_s_address_and_ignores_sigterm(node, address):
    nodes = [SlurmNode("n1", "n1"), SlurmNode("n2", "10.0.0.2")]
    worker = ("python3", "-c", SHOW, "it's", "a b")
    command = worker_command(nodes, port=7000, worker=worker)
    assert {"--nodes=2", "--ntasks=2", "--nodelist=n1,n2", "--no-kill"} <= {*command}
    task = command[command.index("sh") :]
    environment = {**os.environ, "SLURMD_NODENAME": node}
    said = subprocess.run(task, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(said.stdout) == [True, "it's", "a b", "--address", address]


def test_the_log_lies_in_the_run_s_folder(tmp_path):
    assert log_file("a/b", tmp_path) == tmp_path / "a" / "b" / "slurm.log"


def test_submitting_a_run_makes_the_folder_of_its_log(tmp_path, monkeypatch):
    stand_in(tmp_path, "sbatch", f"cat > {tmp_path}/given; echo 3")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = {"run_name": "a/b", "output_dir": tmp_path / "outputs"}
    assert submit_run(SlurmConfig(nodes=2), ["--config", "mine"], **run) == 3
    assert log_file("a/b", tmp_path / "outputs").parent.is_dir()
    assert (tmp_path / "given").read_text() == batch_script(
        SlurmConfig(nodes=2), ["--config", "mine"], **run
    )


@pytest.mark.parametrize(
    ("line", "gone"),
    [
        ("srun: error: n1: task 0: Exited with exit code 3", {0}),
        ("srun: error: n[1-3]: tasks 0,2: Killed", {0, 2}),
        ("srun: error: n[1-3]: tasks 0-1: Terminated", {0, 1}),
        ("srun: error: Node failure on n2", {1}),
        ("srun: error: Node failure on n22", set()),
        ("srun: got SIGCONT", set()),
    ],
)
def test_what_srun_says_of_a_worker_is_why_it_is_gone(line, gone):
    found = {i for i in range(3) if why_task_gone(["srun: a", line], i, f"n{i + 1}")}
    assert found == gone


# ---- the training command -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("--config mine", "--config mine"),
        ("--run_name a --config mine --resume", "--config mine"),
        (
            "--config mine --output_dir=/o --run_name=a --dry_run --steps 3",
            "--config mine --steps 3",
        ),
    ],
)
def test_the_job_trains_as_the_command_that_submits_it(given, kept):
    assert for_the_job(given.split()) == [*kept.split(), "--cluster.slurm.nodes", "0"]


ASKED = ("--cluster.launcher", "slurm", "--cluster.slurm.nodes", "4")
RUN = ("train", "--config", "grpo_sum_digits_tiny", "--run_name", "first", *ASKED)


def test_the_training_command_submits_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*RUN, "--steps", "7", "--dry_run"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=4\n" in script
    assert "arguments=(--config grpo_sum_digits_tiny --cluster.launcher slurm" in script
    assert not (tmp_path / "outputs").exists()
    stand_in(tmp_path, "sbatch", f"cat > {tmp_path}/given; echo 3")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main([*RUN, "--steps", "7"]) == 0
    assert (tmp_path / "given").read_text() == script
    log = tmp_path / "outputs" / "first" / "slurm.log"
    assert capsys.readouterr().out == f"submitted job 3; its output: {log}; `scancel 3` ends it\n"


def test_what_sbatch_refuses_is_an_error_of_the_training_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    stand_in(tmp_path, "sbatch", "echo 'sbatch: error: no such account' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert main([*RUN]) == 2
    assert "sbatch: error: no such account" in capsys.readouterr().err
