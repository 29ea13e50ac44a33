"""A generator that calls a tool at its first turn, and repeats the result at its second."""

from monarch.actor import Actor, concurrent_endpoint
from transformers import AutoTokenizer

from torchtitan_rl.core.types import Completion

CALL = '<tool_call>\n{"name": "lookup", "arguments": {"city": "%s"}}\n</tool_call>'


class CallingGenerator(Actor):
    """Says the same whatever the weights are."""

    def __init__(self, config, *, model, seed):
        self.folder = model

    @concurrent_endpoint
    async def setup(self):
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)

    @concurrent_endpoint
    async def generate(self, prompts, *, sampling_config, group_ids, sample_numbers):
        asked = zip(prompts, sample_numbers, strict=True)
        return [self._say(i, ids, number) for i, (ids, number) in enumerate(asked)]

    def _say(self, i, ids, number):
        shown = self.tokenizer.decode(ids)
        text = CALL % ("Rome" if number == 1 else "Oslo")
        if "tool_response" in shown:
            text = "Italy" if "Italy" in shown else "Norway"
        tokens = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id]
        logprobs = [-1.0] * len(tokens)
        return Completion(0, i, ids, text, tokens, token_logprobs=logprobs, finish_reason="stop")

    @concurrent_endpoint
    async def cancel(self, group_ids): ...

    @concurrent_endpoint
    async def pull_weights(self, handle):
        return handle.version
