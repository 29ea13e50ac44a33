"""Checkpoints with torchtitan's CheckpointManager, and loading and export of HF folders."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer import CheckpointManager, ModelWrapper

from torchtitan_rl.config.checkpoint import AsyncMode
from torchtitan_rl.models.hf import (
    atomic_folder,
    copy_companion_files,
    hf_dtype,
    read_hf_config,
)
from torchtitan_rl.observability.run_folder import find_checkpoints, remove_half_checkpoints


@dataclass(slots=True)
class TrainState(Stateful):
    """Counters that a checkpoint holds beside weights, optimizer and schedule."""

    step: int = 0
    """Number of finished steps of the controller."""
    policy_version: int = 0
    """Number of batches trained on; a step without a trainable episode has none."""
    echo_factor: float = 0.0
    """What the next update multiplies all echo weights by; 0: not known yet."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": torch.tensor(self.step),
            "policy_version": torch.tensor(self.policy_version),
            "echo_factor": torch.tensor(self.echo_factor, dtype=torch.float64),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = int(state_dict["step"])
        self.policy_version = int(state_dict["policy_version"])
        self.echo_factor = float(state_dict["echo_factor"])


class Checkpoints:
    """Checkpoints of one trainer; all ranks call every method together."""

    def __init__(
        self,
        *,
        folder: str,
        keep: int,
        async_mode: AsyncMode = "disabled",
        model: nn.Module,
        optimizers: Any,
        lr_schedulers: Any,
        state: TrainState,
        adapter: Any,
    ) -> None:
        self._model, self._adapter = model, adapter
        # The controller decides when to save, hence an interval of one.
        self._manager = CheckpointManager.Config(
            enable=True,
            folder=folder,
            interval=1,
            keep_latest_k=keep,
            async_mode=async_mode,
            initial_load_in_hf=True,
        ).build(
            dataloader=None,
            model_parts=[model],
            optimizers=optimizers,
            lr_schedulers=lr_schedulers,
            states={"train_state": state},
            sd_adapter=adapter,
        )
        # The manager would save a dataloader; the controller derives its prompts from the step.
        self._manager.states.pop("dataloader")
        self._step = -1
        """The step that was saved last."""

    def load(self, *, resume: bool) -> None:
        """Load the newest complete checkpoint if `resume` and there is one, else the HF folder."""
        if not resume and find_checkpoints(self._manager.folder):
            raise FileExistsError(
                f"{self._manager.folder} already holds checkpoints; resume the run or use another "
                "run name"
            )
        if dist.get_rank() == 0:
            remove_half_checkpoints(self._manager.folder)
        self._manager.load()

    def save(self, step: int, *, wait: bool = True) -> None:
        """Write `step-<step>`; it counts as a checkpoint once its last file is in place. Without
        `wait` an asynchronous one may still be under way, of a copy of what is saved. An error of
        it comes out of the next call."""
        under_way = self._manager.save_future is not None and step == self._step
        if not under_way:
            self._manager.save(step)  # it waits for the one before
            self._step = step
        if wait:
            self._manager.maybe_wait_for_saving()

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The full weights under their HF names, one at a time."""
        with torch.no_grad():
            for name, tensor in self._model.state_dict().items():
                # Gathered first: the adapter splits experts, and would name only those of this
                # rank if they were sharded.
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                yield from self._adapter.to_hf({name: full}).items()

    def export_hf(self, folder: Path, *, source: Path) -> None:
        """Write an HF folder that transformers and vLLM can load; it is complete or absent.

        Weights have the dtype that the config of `source` names.
        """
        dtype = hf_dtype(read_hf_config(source))
        tensors = {
            name: t.detach().to("cpu", dtype).contiguous()
            for name, t in self.hf_tensors()
            if dist.get_rank() == 0
        }
        if dist.get_rank() == 0:
            with atomic_folder(folder) as temporary:
                save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
                copy_companion_files(source, temporary)
        dist.barrier()


def load_hf(model: nn.Module, adapter: Any, folder: str) -> None:
    """Load the weights of an HF folder, each rank its own part; called by all ranks together."""
    wrapped = ModelWrapper(model)
    tensors = adapter.to_hf(wrapped.state_dict())
    dcp.load(tensors, storage_reader=adapter.get_hf_storage_reader(folder))
    wrapped.load_state_dict(adapter.from_hf(tensors))
