"""A generator of your own, in the place of vLLM: transformers' `generate`, one sample at a time.

torchtitan-rl train --module examples/custom_task.py --config palindromes_tiny \
    --generator.backend custom_generator:TransformersGenerator
"""

import torch
from monarch.actor import Actor, concurrent_endpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchtitan_rl.config import GeneratorConfig, SamplingConfig
from torchtitan_rl.core.seeds import sample_seed
from torchtitan_rl.core.types import Completion, FinishReason
from torchtitan_rl.weight_sync.handle import WeightHandle
from torchtitan_rl.weight_sync.reading import open_snapshot


class TransformersGenerator(Actor):
    """Slow, and as simple as it gets: docs/backends.md says what each endpoint must do."""

    def __init__(self, config: GeneratorConfig, *, model: str, seed: int) -> None:
        self.folder, self.seed, self.version = model, seed, 0

    @concurrent_endpoint
    async def setup(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)

    @concurrent_endpoint
    async def generate(
        self, prompts: list, *, sampling_config: list, group_ids: list, sample_numbers: list
    ) -> list[Completion]:
        asked = zip(prompts, sampling_config, group_ids, sample_numbers, strict=True)
        return [self._sample(i, *one) for i, one in enumerate(asked)]

    def _sample(self, i: int, ids: list, how: SamplingConfig, group: str, n: int) -> Completion:
        torch.manual_seed(sample_seed(self.seed, group, n))
        options: dict = {"return_dict_in_generate": True, "output_scores": True, "do_sample": False}
        if how.temperature:
            options |= {"do_sample": True, "temperature": how.temperature, "top_k": 0}
        made = self.model.generate(torch.tensor([ids]), max_new_tokens=how.max_tokens, **options)
        tokens = made.sequences[0, len(ids) :]
        scores = torch.stack(made.scores).squeeze(1).log_softmax(-1)  # [tokens, vocabulary]
        logprobs = scores.gather(1, tokens[:, None]).squeeze(1).tolist()
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        end: FinishReason = "stop" if tokens[-1] == self.tokenizer.eos_token_id else "length"
        return Completion(
            self.version, i, ids, text, tokens.tolist(), token_logprobs=logprobs, finish_reason=end
        )

    @concurrent_endpoint
    async def cancel(self, group_ids: list[str]) -> None: ...

    @concurrent_endpoint
    async def pull_weights(self, handle: WeightHandle) -> int:
        with open_snapshot(handle) as snapshot:
            self.model.load_state_dict(dict(snapshot.tensors()), strict=False)
        self.version = handle.version
        return handle.version
