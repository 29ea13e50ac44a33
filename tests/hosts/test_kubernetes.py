"""Manifests are what Kubernetes accepts, and ask for what the settings say."""

import json
import os
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from torchtitan_rl.cli.main import main
from torchtitan_rl.hosts.launchers.kubernetes import (
    KubernetesError,
    KubernetesRun,
    manifests,
    object_name,
    secret_of_run,
    to_yaml,
)

ALL = {
    **{"nodes": 3, "namespace": "team", "gpus_per_node": 8, "cpus_per_node": "96"},
    **{"memory_per_node": "800Gi", "controller_cpus": "500m", "shared_memory": "200Gi"},
    **{"storage": "2Ti", "storage_class": "nfs", "port": 4000, "user": 4711, "retries": 0},
    **{"stop_seconds": 900, "pull_secret": "registry", "node_selector": {"gpu": "h100"}},
}
SETTINGS = (
    {},
    ALL,
    {"claim": "mine"},
    {"nodes": 2, "controller_cpus": "", "controller_memory": ""},
)
VERSIONS = ("1.29", "1.33", kubernetes_validate.latest_version())


def made(*arguments: str, **settings) -> dict[str, dict]:
    """Manifests by kind."""
    settings = {"name": "mine", "image": "registry/image:1", **settings}
    words = ["--config", "r", *arguments]
    found = manifests(
        KubernetesRun(**settings), words, folder="/shared/outputs/mine", secret="s" * 20
    )
    return {one["kind"]: one for one in found}


def pod(manifest: dict) -> dict:
    return manifest["spec"]["template"]["spec"]


@pytest.mark.parametrize("settings", SETTINGS, ids=["usual", "all", "claim", "small"])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_published_schemas_accept_all_manifests(version, settings):
    for manifest in yaml.safe_load_all(to_yaml(made(**settings).values())):
        kubernetes_validate.validate(manifest, version, strict=True)


def test_yaml_says_what_the_manifests_say_without_aliases():
    found = list(made(**ALL).values())
    assert list(yaml.safe_load_all(to_yaml(found))) == json.loads(json.dumps(found))
    assert "&id" not in to_yaml(found)


def test_every_setting_is_somewhere():
    found = made(**ALL)
    text = to_yaml(found.values())
    for value in ("team", "800Gi", "500m", "200Gi", "2Ti", "nfs", "4711", "registry", "900"):
        assert value in text, value
    workers = pod(found["StatefulSet"])
    assert found["StatefulSet"]["spec"]["replicas"] == 3
    assert workers["containers"][0]["resources"] == {
        "requests": {"cpu": "96", "memory": "800Gi"},
        "limits": {"memory": "800Gi", "nvidia.com/gpu": 8},
    }
    assert workers["nodeSelector"] == {"gpu": "h100"}
    assert found["Job"]["spec"]["backoffLimit"] == 0
    assert "PersistentVolumeClaim" not in made(claim="mine")


@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
def test_pods_may_do_nothing_in_the_cluster_and_little_on_the_node(kind):
    """What the Pod Security Standard `restricted` asks for, and no token."""
    spec = pod(made()[kind])
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"name": "memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "memory", "emptyDir": {"medium": "Memory"}} in spec["volumes"]


def test_only_pods_of_the_run_are_let_in_and_only_they_have_the_secret():
    found = made()
    policy = found["NetworkPolicy"]["spec"]
    [rule] = policy["ingress"]
    [source] = rule["from"]
    for kind in ("StatefulSet", "Job"):
        labels = found[kind]["spec"]["template"]["metadata"]["labels"].items()
        assert policy["podSelector"]["matchLabels"].items() <= labels
        assert source["podSelector"]["matchLabels"].items() <= labels
        variables = {one["name"]: one for one in pod(found[kind])["containers"][0]["env"]}
        reference = variables["TORCHTITAN_RL_SECRET"]["valueFrom"]["secretKeyRef"]
        assert found["Secret"]["metadata"]["name"] == reference["name"]
        assert reference["key"] in found["Secret"]["stringData"]
    assert to_yaml(found.values()).count("s" * 20) == 1


def test_the_controller_finds_every_worker_by_its_name():
    found = made(nodes=2, port=4000)
    words = pod(found["Job"])["containers"][0]["args"]
    hosts = words[words.index("--hosts") + 1].split(",")
    assert hosts == [f"mine-worker-{i}.mine-worker:4000" for i in range(2)]
    assert found["Service"]["metadata"]["name"] == found["StatefulSet"]["spec"]["serviceName"]
    assert found["Service"]["spec"]["clusterIP"] == "None"
    labels = found["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"].items() <= labels.items()
    worker = pod(found["StatefulSet"])["containers"][0]
    assert worker["args"] == ["--address", "$(POD_IP):4000"]
    assert worker["ports"] == [{"name": "worker", "containerPort": 4000}]


def test_the_controller_resumes_a_run_that_is_there(tmp_path):
    run = KubernetesRun(name="mine", image="i", python="echo")
    odd = ["--a", 'it\'s $(HOME) $$ "b"']
    job = manifests(run, odd, folder=f"{tmp_path}/it's mine", secret="s")[-1]
    container = pod(job)["containers"][0]
    # Kubernetes replaces $(NAME) in these words, and $$ by $.
    words = [*container["command"], *container["args"]]
    assert container["args"][1] == 'it\'s $$(HOME) $$$$ "b"'
    command = [word.replace("$$", "$") for word in words]

    def run_it() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    expected = f"-m torchtitan_rl.train {' '.join(odd)} --hosts {run.hosts[0]}"
    assert run_it() == expected
    (tmp_path / "it's mine").mkdir()
    (tmp_path / "it's mine" / "config.json").touch()
    assert run_it() == f"{expected} --resume"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "My_Run"}, "name 'My_Run' cannot name objects"),
        ({"name": "a" * 46}, "at most 45"),
        ({"namespace": "-a"}, "namespace '-a'"),
        ({"image": ""}, "image '' is no image: registry/name:tag"),
        ({"nodes": 0}, "nodes must be at least 1; got 0"),
        ({"user": 0}, "user must be at least 1; got 0"),
        ({"port": 80}, "port must be 1024 to 65535"),
        ({"memory_per_node": "800 GB"}, "memory_per_node '800 GB' is no quantity"),
        ({"stop_seconds": 0}, "stop_seconds must be positive"),
    ],
)
def test_settings_that_kubernetes_would_refuse_are_errors(settings, message):
    with pytest.raises(KubernetesError) as error:
        made(**settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("sweep/GRPO_lr 1e-5", "sweep-grpo-lr-1e-5"),
        ("grpo_sum_digits_tiny-20260101-120000", "grpo-sum-digits-tiny-20260101-120000"),
        ("2nd", "run-2nd"),
        ("///", "run"),
    ],
)
def test_any_run_has_a_name_for_its_objects(text, name):
    assert object_name(text) == name


def test_long_names_that_differ_stay_different():
    names = {object_name(f"{'a' * 60}{end}") for end in range(9)}
    assert len(names) == 9
    for name in names:
        assert KubernetesRun(name=name, image="i").name == name


def test_a_run_s_secret_is_its_own_and_always_the_same():
    runs = [KubernetesRun(name=name, image="i", namespace=n) for name in "ab" for n in ("", "x")]
    secrets = [secret_of_run("of the user", run) for run in runs]
    assert len({*secrets, "of the user"}) == 5
    assert secrets == [secret_of_run("of the user", run) for run in runs]
    assert all(len(secret) >= 40 for secret in secrets)


# ---- the command --------------------------------------------------------------------------------

COMMAND = ("--config", "grpo_sum_digits_tiny", "--image", "i:1")


@pytest.fixture
def secret(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHTITAN_RL_SECRET", "a secret of the user")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("secret")
def test_the_command_prints_manifests_and_says_what_is_next(capsys):
    words = ("--nodes", "2", "--run_name", "First_run", "--steps", "7", "--node_selector", "a=b")
    assert main(["kubernetes", *COMMAND, *words]) == 0
    said = capsys.readouterr()
    found = {one["kind"]: one for one in yaml.safe_load_all(said.out)}
    assert found["StatefulSet"]["spec"]["replicas"] == 2
    assert pod(found["StatefulSet"])["nodeSelector"] == {"a": "b"}
    arguments = pod(found["Job"])["containers"][0]["args"]
    expected = ["--config", "grpo_sum_digits_tiny", "--run_name", "First_run", "--steps", "7"]
    assert arguments[:-2] == expected
    assert "/shared/outputs/First_run/config.json" in str(found["Job"])
    assert "a secret of the user" not in said.out + said.err
    assert "kubectl logs -f job/first-run" in said.err
    assert "-l app.kubernetes.io/instance=first-run" in said.err


@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--image", "i"), "--config is missing; recipes: "),
        (COMMAND[:2], "--image is missing"),
        ((*COMMAND, "--resume"), "--resume is not needed"),
        ((*COMMAND, "--stepz", "3"), "there is no setting --stepz"),
        ((*COMMAND, "--nodes", "0"), "nodes must be at least 1"),
        ((*COMMAND, "--node_selector", "a"), "--node_selector is <key>=<value>; got 'a'"),
        ((*COMMAND, "--name", "No"), "name 'No' cannot name objects"),
    ],
)
def test_a_wrong_command_is_an_error_without_any_manifest(words, message, capsys):
    assert main(["kubernetes", *words]) == 2
    said = capsys.readouterr()
    assert message in " ".join(said.err.split())
    assert said.out == ""


def test_its_secret_file_is_made_when_there_is_none(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TORCHTITAN_RL_SECRET", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["kubernetes", *COMMAND, "--run_name", "a"]) == 0
    first = capsys.readouterr().out
    assert main(["kubernetes", *COMMAND, "--run_name", "a"]) == 0
    assert capsys.readouterr().out == first
    file = Path(tmp_path / ".config" / "torchtitan_rl" / "secret")
    assert os.stat(file).st_mode & 0o777 == 0o600
