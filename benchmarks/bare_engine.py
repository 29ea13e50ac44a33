"""A generator that can also be asked to use nothing but vLLM's own API. In a module of its own:
an actor's class must be importable in the worker.
"""

import time

from monarch.actor import concurrent_endpoint

from torchtitan_rl.actors.generator import VLLMGenerator
from torchtitan_rl.config import SamplingConfig


class BareGenerator(VLLMGenerator):
    """The generator, and its bare engine on the same thread and process."""

    @concurrent_endpoint
    async def bare(self, prompts: list[list[int]], sampling: SamplingConfig) -> float:
        """New tokens a second when nothing but vLLM's own API is used."""
        return await self.engine._between_steps(lambda: self._bare(prompts, sampling))

    def _bare(self, prompts: list[list[int]], sampling: SamplingConfig) -> float:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine = self.engine._engine
        started = time.perf_counter()
        for index, prompt in enumerate(prompts):
            for sample in range(sampling.n):
                engine.add_request(
                    f"bare-{index}-{sample}",
                    {"prompt_token_ids": prompt},
                    SamplingParams(
                        max_tokens=sampling.max_tokens,
                        ignore_eos=False,
                        seed=index * sampling.n + sample,
                        logprobs=0,
                        detokenize=False,
                        output_kind=RequestOutputKind.FINAL_ONLY,
                    ),
                )
        tokens = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens += len(output.outputs[0].token_ids)
        return tokens / (time.perf_counter() - started)
