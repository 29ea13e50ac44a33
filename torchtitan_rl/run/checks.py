"""Checks of a config that need torch, the model folder or the user's own code: before any process
starts. Those that need nothing but the settings are in config/run.py."""

from dataclasses import replace
from typing import Any

from torchtitan_rl.actors.backends import check_backends
from torchtitan_rl.algorithms.advantage import check_advantage
from torchtitan_rl.algorithms.objective import check_loss, episode_needs
from torchtitan_rl.config import RunConfig
from torchtitan_rl.hosts.launchers.launcher import chosen_launcher
from torchtitan_rl.models.hf import check_experts, check_parallelism, read_hf_config
from torchtitan_rl.platform import check_compiler, check_gpus
from torchtitan_rl.platform.doctor import diagnose
from torchtitan_rl.platform.machine import examine
from torchtitan_rl.run.starting_model import model_folder
from torchtitan_rl.weight_sync.transport import check_folder


def check_code(config: RunConfig) -> None:
    """Refuse functions and classes of the user's own that cannot be imported or used."""
    check_loss(config.trainer.loss)
    check_advantage(config.advantage)
    check_backends(config.generator, config.trainer, colocated=config.colocated)


def check_machine(config: RunConfig) -> None:
    """Refuse settings that this machine, its devices or its file system, cannot serve. Other hosts
    are asked when they are connected."""
    if chosen_launcher(config.cluster) != "here":
        return
    check_gpus(config.gpus_needed, can_share=config.could_share_gpus)
    if config.trainer.compile:
        check_compiler()
    check_folder(config.trainer.weight_sync)


def check_installation(config: RunConfig) -> list[str]:
    """Refuse a machine or an installation for GPUs on which a run would fail; returns what else is
    worth a word. `torchtitan-rl doctor` has all of it."""
    if chosen_launcher(config.cluster) != "here":
        return []
    machine = examine(filter(None, (config.output_dir, config.trainer.weight_sync.folder)))
    if machine.torch_cuda is None:
        return []
    findings = diagnose(machine)
    if config.generator.backend != "vllm":
        findings = [finding for finding in findings if finding.what != "packages"]
    said = {
        status: [f"{found.what}: {found.text}" for found in findings if found.status == status]
        for status in ("error", "warning")
    }
    if said["error"]:
        raise ValueError("\n".join(["a run would fail here:", *said["error"]]))
    return said["warning"]


def checked_model(config: RunConfig) -> dict[str, Any]:
    """The starting model's config.json, if the actors can run it as they are set up."""
    hf_config = read_hf_config(model_folder(config))
    check_shape(config, hf_config)
    return hf_config


def check_shape(config: RunConfig, hf_config: dict[str, Any]) -> None:
    """Refuse degrees of parallelism that do not divide a model, and experts that it has not."""
    degree = config.generator.tensor_parallel_degree
    check_parallelism(hf_config, tensor_parallel=degree, who="generator")
    for who, parallelism in (
        ("trainer", config.trainer.parallelism),
        ("reference", config.trainer.reference.parallelism),
    ):
        check_parallelism(
            hf_config,
            tensor_parallel=parallelism.tensor_parallel_degree,
            expert_parallel=parallelism.expert_parallel_degree,
            who=who,
        )
    if config.generator.engine.return_routed_experts:
        own = "generator.engine.return_routed_experts"
        check_experts(hf_config, setting=episode_needs(config.trainer).get("routed_experts", own))


def resolved(config: RunConfig) -> RunConfig:
    """The config with everything switched on that a part of it needs; `notices` says so."""
    sampling, engine = config.generator.sampling, config.generator.engine
    needs = episode_needs(config.trainer)
    if "token_logprobs" in needs:
        sampling = replace(sampling, logprobs=True)
    if "routed_experts" in needs:
        engine = replace(engine, return_routed_experts=True)
    if config.colocated:
        engine = replace(engine, can_sleep=True)
    return replace(config, generator=replace(config.generator, sampling=sampling, engine=engine))


def notices(config: RunConfig) -> list[str]:
    """What the user should know about these settings before the run starts."""
    loss, needs = config.trainer.loss, episode_needs(config.trainer)
    found = loss.notices()
    if config.rollout.train_from:
        return [
            *found,
            f"rollout.train_from {config.rollout.train_from}: its rollouts are trained as they "
            "were recorded, with their advantages, echo weights and untrained share; nothing is "
            "generated, graded or evaluated",
        ]
    if config.max_offpolicy_steps and "token_logprobs" not in needs:
        found.append(
            "with max_offpolicy_steps, tokens of older weights are trained on, and "
            f"{loss.name} counts them as new; trainer.loss.name dppo or "
            "trainer.loss.correction.importance_weight token would not"
        )
    for name, on, what in (
        ("token_logprobs", config.generator.sampling.logprobs, "the generator's logprobs"),
        ("routed_experts", config.generator.engine.return_routed_experts, "its experts"),
    ):
        if name in needs and not on:
            found.append(f"{needs[name]} needs {what}: recording is switched on")
    return found
