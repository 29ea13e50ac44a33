"""Where the model that a run starts from is, or will be once a warm start has made it."""

import ast
import hashlib
import inspect
import json
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan_rl.config import GeneratorConfig, RunConfig, TaskConfig, TrainerConfig
from torchtitan_rl.models.makers.tiny import tiny_config
from torchtitan_rl.tasks.task import Task


def model_folder(config: RunConfig) -> Path:
    """The HF folder that a run starts from.

    With a warm start its name has a digest: other settings, or a task whose code has changed, give
    another folder. So do backends other than the default ones: what these make must not be taken
    for what a real trainer has learned.
    """
    warm, task = config.warm_start, config.task
    if config.model or warm is None:
        return Path(config.model).absolute()
    settings: dict[str, Any] = {
        "warm_start": asdict(warm),
        "tasks": [_imitated(part) for part in task.parts()],
        "weights": task.to_dict().get("weights"),
        "code": [_source(type(part)._owner) for part in task.parts()],
        "model": tiny_config(warm.experts),
        "thinking": config.rollout.thinking,
        # By which `enough_accuracy` is judged; in the task's own settings, if it has any.
        "sampling": {
            name: getattr(config.generator.sampling, name)
            for name in ("temperature", "top_p", "top_k")
        },
        "seed": config.seed,
    }
    pairs = ((config.generator, GeneratorConfig()), (config.trainer, TrainerConfig()))
    if stand_ins := [own.backend for own, usual in pairs if own.backend != usual.backend]:
        settings["stand_ins"] = stand_ins
    for name in ("cache_dir", "experts"):
        settings["warm_start"].pop(name)
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=4)
    name = f"tiny-{task.name}-seed{config.seed}-{digest.hexdigest()}"
    return (Path(warm.cache_dir) / name).absolute()


def _imitated(task: TaskConfig) -> dict[str, Any]:
    """A task's settings without those that imitation knows nothing of."""
    settings = task.to_dict()
    settings.pop("echo")
    return settings


def _source(owner: type | None) -> str:
    """The code of a task and of what it builds on, without comments and docstrings: to word one of
    these differently makes no other model."""
    classes = [c for c in (owner.__mro__ if owner else ()) if issubclass(c, Task) and c is not Task]
    try:
        return "\n".join(_bare_code(inspect.getsource(c)) for c in classes)
    except OSError:  # typed into a notebook or a console
        return ""


def _bare_code(source: str) -> str:
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            code = [statement for statement in node.body if not _is_text(statement)]
            node.body = code or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
