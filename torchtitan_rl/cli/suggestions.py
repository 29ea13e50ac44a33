"""Suggestions for a flag that is unknown: from a table of common names, or by likeness."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

MOST_SUGGESTED = 3
"""Most settings that an error suggests for one flag."""
LEAST_ALIKE = 0.6
"""How alike two names must be, from 0 to 1, for one to be suggested for the other."""

NAMES_ELSEWHERE: dict[str, tuple[str, ...]] = {
    "trainer.optimizer.lr": ("lr", "learning_rate", "actor_lr"),
    "trainer.optimizer.weight_decay": ("wd",),
    "trainer.optimizer.betas": ("adam_beta1", "adam_beta2"),
    "trainer.lr_scheduler.warmup_steps": ("warmup", "num_warmup_steps", "lr_warmup_steps"),
    "trainer.lr_scheduler.decay_type": ("lr_scheduler_type", "lr_decay"),
    "trainer.max_grad_norm": ("grad_clip", "gradient_clip", "clip_grad", "clip_grad_norm"),
    "trainer.loss.name": ("loss", "loss_type", "loss_fn", "algorithm", "algo", "policy_loss"),
    "trainer.loss.kwargs": (
        *("epsilon", "epsilon_low", "epsilon_high", "eps_clip", "clip_eps", "clip_ratio"),
        *("cliprange", "clip_range", "clip_low", "clip_high"),
    ),
    "trainer.loss.ref_kl.coef": (
        *("beta", "kl_coef", "kl_beta", "kl_coeff", "kl_loss_coef", "init_kl_coef", "kl_penalty"),
        *("kl", "ref_kl"),
    ),
    "trainer.updates_per_step": ("num_iterations", "ppo_epochs", "minibatches", "mini_batches"),
    "trainer.tokens_per_microbatch": (
        *("micro_batch_size", "microbatch_size", "per_device_train_batch_size"),
        *("gradient_accumulation_steps", "max_tokens_per_gpu"),
    ),
    "trainer.activation_checkpoint": ("gradient_checkpointing", "activation_checkpointing"),
    "trainer.parallelism.data_parallel_shard_degree": ("dp", "fsdp", "num_gpus", "world_size"),
    "trainer.parallelism.tensor_parallel_degree": ("tp", "tp_size"),
    "trainer.parallelism.expert_parallel_degree": ("ep", "ep_size"),
    "trainer.compile": ("torch_compile", "use_torch_compile"),
    "advantage.name": ("adv_estimator", "advantage_estimator", "baseline", "scale_rewards"),
    "prompts_per_step": (
        *("batch_size", "train_batch_size", "global_batch_size", "rollout_batch_size", "bs"),
        *("num_prompts", "generation_batch_size"),
    ),
    "steps": (
        *("epochs", "num_epochs", "num_train_epochs", "total_epochs", "max_steps", "num_steps"),
        *("train_steps", "total_steps", "total_training_steps", "iterations"),
    ),
    "generator.sampling.n": (
        *("n", "num_generations", "num_samples", "n_samples", "samples", "samples_per_prompt"),
        *("n_samples_per_prompt", "num_return_sequences", "group_size", "rollout_n"),
    ),
    "generator.sampling.max_tokens": (
        *("max_tokens", "max_new_tokens", "max_completion_length", "max_completion_tokens"),
        *("max_response_length", "response_length", "generate_max_len"),
    ),
    "generator.sampling.temperature": ("temperature", "temp"),
    "generator.engine.max_model_len": (
        *("max_length", "max_len", "max_seq_len", "max_seq_length", "seq_len", "context_length"),
        *("max_prompt_length", "max_model_length"),
    ),
    "generator.engine.kv_cache_gib": ("gpu_memory_utilization", "vllm_gpu_memory_utilization"),
    "generator.tensor_parallel_degree": ("tensor_parallel_size", "vllm_tensor_parallel_size"),
    "generator.replicas": ("num_engines", "vllm_num_engines", "num_generators", "num_workers"),
    "max_offpolicy_steps": ("staleness", "max_staleness", "async_level", "off_policy_steps"),
    "placement": ("colocate", "colocate_all", "colocate_all_models", "vllm_mode", "hybrid_engine"),
    "evaluation.every": ("eval_steps", "eval_every", "eval_interval", "val_interval", "test_freq"),
    "checkpoint.every": ("save_steps", "save_every", "save_interval", "save_freq"),
    "checkpoint.keep": ("save_total_limit", "keep_latest_k", "max_ckpt_to_keep"),
    "log.wandb_project": ("wandb", "report_to", "project", "project_name"),
    "model": ("model_name", "model_path", "model_name_or_path", "base_model", "pretrain"),
    "task.path": ("dataset", "dataset_name", "dataset_path", "data", "data_path", "train_file"),
    "task.instructions": ("system_prompt", "system_message", "system"),
    "output_dir": ("out_dir", "output", "out", "output_folder", "save_path", "log_dir"),
    "run_name": ("name", "experiment_name", "exp_name", "run"),
    "resume": ("resume_from_checkpoint", "resume_from", "continue", "load_checkpoint"),
    "fork_from": ("fork", "init_from", "load_from"),
    "dry_run": ("dryrun", "debug", "test"),
}
"""Settings, and what they are called in other libraries or would be called for short."""

NOT_THERE: dict[str, str] = {
    "context_parallel_degree": "torchtitan 0.3 cannot split rows of packed documents among ranks "
    "(context parallelism); lower trainer.tokens_per_microbatch",
    "pipeline_parallel_degree": "the model is not split by layers (pipeline parallelism); raise "
    "trainer.parallelism.data_parallel_shard_degree or tensor_parallel_degree",
}
"""Settings of torchtitan that have no counterpart, and why."""


def setting_names(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings of a config, as the command line has them.

    Example:
        >>> list(setting_names(CheckpointConfig(), "checkpoint."))
        ['checkpoint.every', 'checkpoint.keep']
    """
    for field in fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        parts = dict(enumerate(value)) if isinstance(value, list) else {}
        if is_dataclass(value):
            yield from setting_names(value, f"{name}.")
        elif parts and all(map(is_dataclass, parts.values())):
            for number, part in parts.items():
                yield from setting_names(part, f"{name}.{number}.")
        else:
            yield name


def suggest(flag: str, names: Sequence[str]) -> list[str]:
    """The settings that a flag may stand for, the likeliest first.

    Example:
        >>> suggest("--learning_rate", ["steps", "trainer.optimizer.lr"])
        ['trainer.optimizer.lr']
        >>> suggest("--sampling.temprature", ["generator.sampling.temperature", "steps"])
        ['generator.sampling.temperature']
        >>> suggest("--no-log.samples", ["log.samples", "steps"])
        ['log.no-samples']
    """
    given = flag.lstrip("-").replace("-", "_")
    if (switch := given.removeprefix("no_")) != given and switch in names:
        group, dot, name = switch.rpartition(".")
        return [f"{group}{dot}no-{name}"]
    last = given.rpartition(".")[2]
    meant = [
        name
        for name, others in NAMES_ELSEWHERE.items()
        if (given in others or last in others) and (name in names or name == "dry_run")
    ]
    if meant:
        return meant[:MOST_SUGGESTED]
    likeness = {name: _likeness(given, name) for name in names}
    # Of settings that are as much alike, the one with the shortest way to it.
    alike = sorted(names, key=lambda name: (-likeness[name], name.count(".")))
    return [name for name in alike if likeness[name] >= LEAST_ALIKE][:MOST_SUGGESTED]


def _likeness(given: str, name: str) -> float:
    """How alike a flag and a setting are: as a whole, or as far as the flag has dots."""
    end = ".".join(name.split(".")[-given.count(".") - 1 :])
    return max(difflib.SequenceMatcher(None, given, whole).ratio() for whole in (name, end))


def describe_unknown(arguments: Sequence[str], names: Iterator[str], *, prog: str) -> str:
    """An error for arguments that the command line could not place: flags and their values."""
    flags = [a.partition("=")[0] for a in arguments if a[:1] == "-" and a.lstrip("-")[:1].isalpha()]
    if not flags:
        return f"unexpected argument {arguments[0]!r}: a setting is --<name> <value>"
    known, said = list(names), []
    for flag in dict.fromkeys(flags):
        if why := NOT_THERE.get(flag.rpartition(".")[2].lstrip("-")):
            said.append(f"there is no setting {flag}: {why}")
            continue
        found = suggest(flag, known)
        meant = f": did you mean {' or '.join(f'--{name}' for name in found)}?" if found else ""
        said.append(f"there is no setting {flag}{meant}")
    return f"{'; '.join(said)} ({prog} --help lists all settings)"
