"""vLLM scheduling as it does on a GPU, ahead of what it has read, with the CPU's worker.

The scheduler, the engine's core with its queue of batches, and the connector that returns routing
are vLLM's own. Only the model's runner is the CPU's: it computes a batch at once, but hands the
output over when it is asked for, as that of a GPU does.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.worker import (
    AuxOutputWorkerConnector,
    PendingAuxOutput,
)
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput


@dataclass
class LateOutput(AsyncModelRunnerOutput):
    """The output of a batch, taken from the connector when it is read."""

    output: ModelRunnerOutput
    routing: PendingAuxOutput

    def get_output(self) -> ModelRunnerOutput:
        self.output.aux_output_connector_output = self.routing.process_output()
        return self.output


def schedule_ahead() -> None:
    """Have engines that are made from now on in this process schedule ahead, and return routing."""
    initialize = UniProcExecutor.initialize_from_config

    def initialize_from_config(self: UniProcExecutor, configs: list[Any]) -> None:
        initialize(self, configs)
        # After the worker was made, before the scheduler is.
        self.vllm_config.scheduler_config.async_scheduling = True
        self.vllm_config.aux_output_config.enable_return_routed_experts = True
        return_routing(self, configs[0])

    UniProcExecutor.initialize_from_config = initialize_from_config


def return_routing(executor: UniProcExecutor, kv_cache_config: Any) -> None:
    """Have the worker's runner do what vLLM's runner for a GPU does to return routing."""
    runner = executor.driver_worker.worker.model_runner
    connector = AuxOutputWorkerConnector(
        vllm_config=executor.vllm_config,
        model=runner.get_model(),
        kv_cache_config=kv_cache_config,
    )
    execute, sample = runner.execute_model, runner.sample_tokens
    under_way: list[PendingAuxOutput] = []

    def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        connector.begin_step(scheduled.aux_output_connector_metadata)
        output = execute(scheduled, *args, **kwargs)
        if scheduled.total_num_scheduled_tokens:
            batch = runner.input_batch
            requests = batch.num_reqs
            made = SimpleNamespace(
                req_ids=list(batch.req_ids),
                num_computed_tokens_np=batch.num_computed_tokens_cpu[:requests].copy(),
                query_start_loc_np=runner.query_start_loc.np[: requests + 1].copy(),
            )
            routing = connector.prepare_output(made)
            one, none = np.ones(requests, int), np.zeros(requests, int)
            routing.enqueue_cpu_copy(num_sampled=one, num_rejected=none)
            under_way.append(routing)
        return output

    def sample_tokens(*args: Any, **kwargs: Any) -> LateOutput:
        return LateOutput(sample(*args, **kwargs), under_way.pop())

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
