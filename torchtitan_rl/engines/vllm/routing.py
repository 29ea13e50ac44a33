"""The experts the generator chose, for router replay: one interface, a source for CPU and for GPU.

On a GPU vLLM returns them itself. On a CPU that part of vLLM does not run (it needs Triton), so a
recorder in vLLM's worker listens to the routers; see `routing_recorder.py`.
"""

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from torchtitan_rl.core.experts import expert_dtype, filler
from torchtitan_rl.models.hf import check_experts, moe_layers, read_hf_config
from torchtitan_rl.platform import device_type


class RoutingSource(Protocol):
    """A source of the routing of finished requests."""

    def take(self, output: Any) -> np.ndarray:
        """[prompt + completion tokens, layers with experts, top_k] of a finished request, once."""
        ...

    def drop(self, request_ids: Sequence[str]) -> None:
        """Discard the routing of requests that were aborted."""
        ...


class RecordedRouting:
    """Routing from the recorders in vLLM's workers; all see the same, so the first one is asked."""

    def __init__(self, engine: Any) -> None:
        self._rpc = engine.collective_rpc
        self._rpc("record_routing")

    def take(self, output: Any) -> np.ndarray:
        return _complete(self._rpc("take_routing", args=(output.request_id,))[0], output)

    def drop(self, request_ids: Sequence[str]) -> None:
        self._rpc("drop_routing", args=(list(request_ids),))


class ReturnedRouting:
    """Routing that vLLM returns with its outputs, with a row for every layer, dense ones too."""

    def __init__(self, hf: dict[str, Any]) -> None:
        self._layers, self._dtype = moe_layers(hf), expert_dtype(hf["num_experts"])

    def take(self, output: Any) -> np.ndarray:
        rows = output.outputs[0].routed_experts
        return _complete(rows[:, self._layers].astype(self._dtype), output)

    def drop(self, request_ids: Sequence[str]) -> None:
        pass


def engine_options() -> dict[str, Any]:
    """Engine arguments by which vLLM has routing to return."""
    if device_type() == "cpu":
        return {}
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the one that can
    return {"enable_return_routed_experts": True}


def make_routing_source(engine: Any, model: str) -> RoutingSource:
    """The source for this platform, of an engine built with `engine_options` for an HF folder."""
    hf = read_hf_config(model)
    check_experts(hf, setting="generator.engine.return_routed_experts")
    return RecordedRouting(engine) if device_type() == "cpu" else ReturnedRouting(hf)


def _complete(rows: np.ndarray, output: Any) -> np.ndarray:
    """Rows of a request, with one for the last sampled token, which is never fed back in."""
    tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
    if len(rows) < tokens - 1:
        raise RuntimeError(
            f"request {output.request_id} has {tokens} tokens but the routing of {len(rows)}"
        )
    _, layers, top_k = rows.shape
    return np.concatenate([rows[: tokens - 1], filler(1, layers, top_k, rows.dtype)])
