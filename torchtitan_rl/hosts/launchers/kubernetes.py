"""Kubernetes: manifests of a run, for `kubectl apply`. Nothing here talks to a cluster.

A StatefulSet has the workers, one pod each; a Job has the controller, which is started again where
the run is if its pod is lost. Results lie on a volume that all pods share.
"""

import base64
import hashlib
import hmac
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from torchtitan_rl.core.errors import TorchtitanRLError
from torchtitan_rl.hosts.addresses import USUAL_PORT
from torchtitan_rl.hosts.secret import VARIABLE as SECRET_VARIABLE

Manifest = dict[str, Any]

LONGEST_NAME = 45
"""Characters of a run's name: names of pods and values of labels, of at most 63, begin with it."""
SHARED = "/shared"
"""Where the volume that all pods share is mounted; the working folder of all of them."""
NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
NAMESPACE = re.compile(r"(?=.{1,63}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i?|[mk])?")
OWN_OPTIONS = ("--hosts", "--resume")
"""Options of the training command that the manifests set themselves."""


class KubernetesError(TorchtitanRLError, ValueError):
    """Settings that no manifest can be made from; the message says what to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRun:
    """What to ask a Kubernetes cluster for. Empty and 0 leave it to the cluster.

    Example:
        KubernetesRun(name="math", image="registry/rl:1", nodes=4, gpus_per_node=8)
    """

    name: str
    """Name of all objects; `object_name` makes one from any text."""
    image: str
    """Image with Python and this library, for workers and controller."""
    nodes: int = 1
    """Workers, each a pod."""
    namespace: str = ""
    """Namespace; empty: the current one of kubectl."""
    gpus_per_node: int = 0
    """GPUs of each worker."""
    cpus_per_node: str = ""
    """CPUs that each worker asks for, such as 96."""
    memory_per_node: str = ""
    """Memory of each worker, such as 800Gi; its /dev/shm counts."""
    controller_cpus: str = "2"
    """CPUs that the controller asks for."""
    controller_memory: str = "8Gi"
    """Memory of the controller."""
    shared_memory: str = ""
    """Largest size of /dev/shm, in which weights are exchanged; empty: up to the memory."""
    claim: str = ""
    """A PersistentVolumeClaim that is there already; empty: one for all runs is made."""
    storage: str = "100Gi"
    """Size of the volume that is made."""
    storage_class: str = ""
    """Storage class of the volume that is made; ReadWriteMany must be possible with it."""
    port: int = USUAL_PORT
    """Port of the workers."""
    user: int = 1000
    """User and group that all processes run as; not 0."""
    python: str = "python"
    """Interpreter in the image."""
    retries: int = 6
    """How often the controller is started again after errors; lost nodes do not count."""
    stop_seconds: int = 300
    """Seconds that a controller whose pod has to go may take to save and stop."""
    pull_secret: str = ""
    """Secret with the password of the image's registry."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes that workers may use."""

    def __post_init__(self) -> None:
        if len(self.name) > LONGEST_NAME or not NAME.fullmatch(self.name):
            raise KubernetesError(
                f"name {self.name!r} cannot name objects of Kubernetes: use at most {LONGEST_NAME} "
                "lower-case letters, digits and -, from a letter to a letter or digit"
            )
        if self.namespace and not NAMESPACE.fullmatch(self.namespace):
            raise KubernetesError(
                f"namespace {self.namespace!r} can be none of Kubernetes: use at most 63 "
                "lower-case letters, digits and -"
            )
        if not self.image or re.search(r"\s", self.image):
            raise KubernetesError(f"image {self.image!r} is no image: registry/name:tag")
        for name, least in (("nodes", 1), ("gpus_per_node", 0), ("retries", 0), ("user", 1)):
            if getattr(self, name) < least:
                raise KubernetesError(f"{name} must be at least {least}; got {getattr(self, name)}")
        if self.stop_seconds < 1:
            raise KubernetesError(f"stop_seconds must be positive; got {self.stop_seconds}")
        if not 1024 <= self.port < 65536:
            raise KubernetesError(
                f"port must be 1024 to 65535, which users may listen on; got {self.port}"
            )
        for name in ("cpus_per_node", "memory_per_node", "controller_cpus", "controller_memory"):
            self._check_quantity(name)
        for name in ("shared_memory", "storage"):
            self._check_quantity(name)

    def _check_quantity(self, name: str) -> None:
        text = getattr(self, name)
        if text and not QUANTITY.fullmatch(text):
            raise KubernetesError(f"{name} {text!r} is no quantity, such as 4, 500m or 200Gi")

    @property
    def workers(self) -> str:
        """Name of the workers' StatefulSet and Service."""
        return f"{self.name}-worker"

    @property
    def hosts(self) -> list[str]:
        """Names by which pods of the run reach the workers."""
        return [f"{self.workers}-{i}.{self.workers}:{self.port}" for i in range(self.nodes)]

    @property
    def volume_claim(self) -> str:
        """Name of the claim of the volume that all pods share."""
        return self.claim or "torchtitan-rl"


def object_name(text: str) -> str:
    """A name of Kubernetes made from any text, the end of which is kept if it is long.

    Example:
        >>> object_name("sweep/GRPO_lr 1e-5")
        'sweep-grpo-lr-1e-5'
        >>> object_name("2nd")
        'run-2nd'
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"run-{name}".rstrip("-")
    if len(name) <= LONGEST_NAME:
        return name
    # Names of two runs of a sweep may differ at any place.
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9].rstrip('-')}-{digest}"


def secret_of_run(secret: str, run: KubernetesRun) -> str:
    """A secret for one run, made from the user's: equal when manifests are made once more, and no
    help with the user's other runs to whoever reads it in the cluster."""
    text = f"torchtitan_rl kubernetes {run.namespace}/{run.name}".encode()
    digest = hmac.new(secret.encode(), text, hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def manifests(
    run: KubernetesRun,
    arguments: Sequence[str],
    *,
    folder: PurePosixPath | str,
    secret: str,
) -> list[Manifest]:
    """All objects of a run, in the order in which they are to be made.

    Args:
        run: What to ask the cluster for.
        arguments: Arguments of the training command, which name the run, without --hosts and
            --resume.
        folder: The run's folder, as seen from the volume that all pods share.
        secret: What controller and workers show each other: `secret_of_run`.
    """
    for argument in arguments:
        if argument.partition("=")[0] in OWN_OPTIONS:
            raise KubernetesError(f"{argument} is set by the manifests: leave it out")
    made = [secret_object(run, secret), network_policy(run), service(run)]
    if not run.claim:
        made.insert(0, volume_claim(run))
    return [*made, worker_set(run, secret), controller_job(run, arguments, folder=folder)]


def to_yaml(objects: Iterable[Manifest]) -> str:
    """Manifests as text, one YAML document each."""
    import yaml  # not needed to make them

    class Plain(yaml.SafeDumper):
        """Repeats what is there twice, where YAML would have an alias."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    texts = (yaml.dump(one, Dumper=Plain, sort_keys=False, width=100) for one in objects)
    return "".join(f"---\n{text}" for text in texts)


# ---- objects ------------------------------------------------------------------------------------


def volume_claim(run: KubernetesRun) -> Manifest:
    """The volume for models, checkpoints and results; without the run's label, because runs share
    it, and it is to be there when they are removed."""
    storage = {"storageClassName": run.storage_class} if run.storage_class else {}
    spec = {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": run.storage}},
        **storage,
    }
    claim = _object(run, "v1", "PersistentVolumeClaim", run.volume_claim, spec=spec)
    del claim["metadata"]["labels"]["app.kubernetes.io/instance"]
    return claim


def secret_object(run: KubernetesRun, secret: str) -> Manifest:
    """The run's secret; pods have it in their environment."""
    return _object(
        run, "v1", "Secret", run.name, type="Opaque", stringData={SECRET_VARIABLE: secret}
    )


def network_policy(run: KubernetesRun) -> Manifest:
    """Only pods of the run reach its pods: connections are not encrypted, and some that PyTorch
    opens are not even asked for the secret."""
    spec = {
        "podSelector": {"matchLabels": _labels(run)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": _labels(run)}}]}],
    }
    return _object(run, "networking.k8s.io/v1", "NetworkPolicy", run.name, spec=spec)


def service(run: KubernetesRun) -> Manifest:
    """Names for the workers' pods."""
    spec = {
        "clusterIP": "None",
        # The controller waits for workers by itself, and has to find those that start slowly.
        "publishNotReadyAddresses": True,
        "selector": _labels(run, "worker"),
        "ports": [{"name": "worker", "port": run.port, "targetPort": "worker"}],
    }
    return _object(run, "v1", "Service", run.workers, spec=spec)


def worker_set(run: KubernetesRun, secret: str) -> Manifest:
    """The workers. `secret` is only told apart: workers start again when it is another."""
    probe = {"tcpSocket": {"port": "worker"}}
    container = {
        **_container(run, "worker", cpus=run.cpus_per_node, memory=run.memory_per_node),
        "command": [run.python, "-m", "torchtitan_rl", "worker"],
        "args": ["--address", f"$(POD_IP):{run.port}"],
        "ports": [{"name": "worker", "containerPort": run.port}],
        # Importing the library from a cold disk takes minutes at worst.
        "startupProbe": {**probe, "periodSeconds": 5, "failureThreshold": 60},
        "readinessProbe": {**probe, "periodSeconds": 10},
        # Only a worker that has not answered for minutes is started again, and its actors with it.
        "livenessProbe": {**probe, "periodSeconds": 30, "failureThreshold": 10},
    }
    if run.gpus_per_node:
        container["resources"]["limits"]["nvidia.com/gpu"] = run.gpus_per_node
    pod = _pod(run, "worker", container, restart="Always")
    pod["metadata"]["annotations"] = {
        "torchtitan-rl/secret": hashlib.sha256(secret.encode()).hexdigest()[:16]
    }
    pod["spec"] |= {"affinity": _apart(run), "terminationGracePeriodSeconds": 30}
    if run.node_selector:
        pod["spec"]["nodeSelector"] = dict(run.node_selector)
    if run.gpus_per_node:
        pod["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    spec = {
        "serviceName": run.workers,
        "replicas": run.nodes,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": _labels(run, "worker")},
        "template": pod,
    }
    return _object(run, "apps/v1", "StatefulSet", run.workers, role="worker", spec=spec)


def controller_job(
    run: KubernetesRun, arguments: Sequence[str], *, folder: PurePosixPath | str
) -> Manifest:
    """The controller: the training command, which resumes the run if it is there."""
    config = shlex.quote(str(PurePosixPath(folder) / "config.json"))
    resume = f'if [ -e {config} ]; then set -- "$@" --resume; fi; exec "$0" "$@"'
    container = {
        **_container(run, "controller", cpus=run.controller_cpus, memory=run.controller_memory),
        "command": ["sh", "-c", _literal(resume), run.python, "-m", "torchtitan_rl.train"],
        "args": [*map(_literal, arguments), "--hosts", ",".join(run.hosts)],
    }
    pod = _pod(run, "controller", container, restart="Never")
    pod["spec"]["terminationGracePeriodSeconds"] = run.stop_seconds
    # A pod that has to leave its node is replaced as often as that happens.
    moved = {"type": "DisruptionTarget", "status": "True"}
    spec = {
        "backoffLimit": run.retries,
        "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": [moved]}]},
        "template": pod,
    }
    return _object(run, "batch/v1", "Job", run.name, role="controller", spec=spec)


# ---- parts of objects ---------------------------------------------------------------------------


def _literal(text: str) -> str:
    """A word of a container's command line, in which Kubernetes replaces $(NAME) by a variable and
    $$ by a dollar.

    Example:
        >>> _literal("costs $$5 or $(PRICE)")
        'costs $$$$5 or $$(PRICE)'
    """
    return text.replace("$$", "$$$$").replace("$(", "$$(")


def _object(
    run: KubernetesRun, version: str, kind: str, name: str, role: str = "", **content: Any
) -> Manifest:
    metadata: Manifest = {"name": name, "labels": _labels(run, role)}
    if run.namespace:
        metadata["namespace"] = run.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def _labels(run: KubernetesRun, role: str = "") -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "torchtitan-rl", "app.kubernetes.io/instance": run.name}
    return labels | ({"app.kubernetes.io/component": role} if role else {})


def _container(run: KubernetesRun, name: str, *, cpus: str, memory: str) -> Manifest:
    """What the containers of worker and controller share."""
    requests = {"cpu": cpus, "memory": memory}
    environment: list[Manifest] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {
            "name": SECRET_VARIABLE,
            "valueFrom": {"secretKeyRef": {"name": run.name, "key": SECRET_VARIABLE}},
        },
        # Libraries cache in it, and the user may have none in the image.
        {"name": "HOME", "value": "/tmp"},
    ]
    return {
        "name": name,
        "image": run.image,
        "workingDir": SHARED,
        "env": environment,
        "resources": {
            "requests": {kind: amount for kind, amount in requests.items() if amount},
            "limits": {"memory": memory} if memory else {},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "shared", "mountPath": SHARED},
            {"name": "memory", "mountPath": "/dev/shm"},
            {"name": "scratch", "mountPath": "/tmp"},
        ],
    }


def _pod(run: KubernetesRun, role: str, container: Manifest, *, restart: str) -> Manifest:
    """A template of pods that may do nothing in the cluster and little on the node."""
    size = {"sizeLimit": run.shared_memory} if run.shared_memory else {}
    spec: Manifest = {
        "restartPolicy": restart,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": run.user,
            "runAsGroup": run.user,
            "fsGroup": run.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": run.volume_claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory", **size}},
            {"name": "scratch", "emptyDir": {}},
        ],
    }
    if run.pull_secret:
        spec["imagePullSecrets"] = [{"name": run.pull_secret}]
    return {"metadata": {"labels": _labels(run, role)}, "spec": spec}


def _apart(run: KubernetesRun) -> Manifest:
    """Workers on different nodes, if there are enough."""
    term = {
        "labelSelector": {"matchLabels": _labels(run, "worker")},
        "topologyKey": "kubernetes.io/hostname",
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
