"""An in-process vLLM engine on a thread of its own; usable without any actor.

Everything that touches the engine runs on that thread, between two engine steps: new requests,
aborts, weight swaps, sleep. So a swap needs no lock, and a step is never interrupted.
"""

import asyncio
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_rl.config.generator import EngineConfig
from torchtitan_rl.config.sampling import SamplingConfig
from torchtitan_rl.core.errors import ActorBrokenError, TorchtitanRLError
from torchtitan_rl.core.seeds import sample_seed
from torchtitan_rl.core.types import Completion, Prompt
from torchtitan_rl.engines.vllm.build import build_llm_engine
from torchtitan_rl.engines.vllm.routing import RoutingSource, make_routing_source
from torchtitan_rl.models.hf import has_weights, tensor_shapes
from torchtitan_rl.weight_sync.handle import WeightHandle
from torchtitan_rl.weight_sync.reading import check_model

FETCH_SECONDS = 0.02
"""How often the ranks are asked whether they have received weights: processes of their own cannot
tell by themselves."""


class PromptError(TorchtitanRLError, ValueError):
    """A prompt the engine cannot take; the message names it and says why."""


class EngineDiedError(ActorBrokenError):
    """The engine failed in a step; every request in flight failed with it."""


class NoWeightsError(TorchtitanRLError, RuntimeError):
    """The engine was started without weights, and none have come yet."""


class EngineAsleepError(TorchtitanRLError, RuntimeError):
    """The engine has given its memory back, and cannot sample until it is woken."""


@dataclass(slots=True)
class _Call:
    """One `generate` call in flight: filled request by request, resolved as a whole."""

    future: Future
    names: frozenset[str]
    completions: list[Completion | None]
    missing: int
    request_ids: list[str]


@dataclass(slots=True)
class _Slot:
    """One request in flight: where its completion goes, and who samples it."""

    call: _Call
    index: int
    prompt_idx: int
    vllm_id: str
    """Id of the request in vLLM."""
    versions: list[tuple[int, int]]
    """Pairs of a first token and the policy version that sampled from it on; several after a
    swap."""

    def token_versions(self, tokens: int) -> list[int]:
        """Policy version of each of the request's tokens.

        Example:
            versions [(0, 3), (2, 4)], 5 tokens: [3, 3, 4, 4, 4]
        """
        ends = [first for first, _ in self.versions[1:]] + [tokens]
        return [
            version
            for (first, version), end in zip(self.versions, ends, strict=True)
            for _ in range(first, end)
        ]


class Engine:
    """Continuous batching over concurrent `generate` calls, with weight swaps between steps."""

    def __init__(
        self, model: str, config: EngineConfig, *, seed: int, tensor_parallel: int = 1
    ) -> None:
        self._model, self._config = model, config
        self._seed, self._tensor_parallel = seed, tensor_parallel
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._slots: dict[str, _Slot] = {}
        self._ids = itertools.count()
        self._dead: BaseException | None = None
        self._routing: RoutingSource | None = None
        self.policy_version = 0
        self.state: Literal["awake", "asleep"] = "awake"
        """Asleep, it has neither weights nor KV cache."""
        self._open = asyncio.Event()
        self._open.set()
        self._in_flight: set[asyncio.Future] = set()
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="vllm-engine", daemon=True
        )
        self._thread.start()
        started.result()

    # ---- called from any thread or event loop -------------------------------------------------

    async def generate(
        self,
        prompts: list[Prompt],
        sampling: SamplingConfig | list[SamplingConfig],
        group_ids: list[str],
        sample_numbers: list[int] | None = None,
    ) -> list[Completion]:
        """All samples of all prompts, ordered by prompt, then sample. `sampling` is for all of
        them, or a list has one for each; so is the number of each prompt's first sample, which is
        0 unless it is given."""
        samplings = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        firsts = sample_numbers or [0] * len(prompts)
        await self._open.wait()  # weights are waiting for the engine to be empty
        call = _Call(Future(), frozenset(group_ids), [], 0, [])
        made = asyncio.wrap_future(call.future)
        self._in_flight.add(made)
        try:
            await self._between_steps(
                lambda: self._add(call, prompts, samplings, group_ids, firsts)
            )
            return await made
        except asyncio.CancelledError:
            # Nobody waits for these any more; do not let them take the engine's time.
            self._submit(lambda: self._abort(call))
            raise
        finally:
            made.cancel()
            self._in_flight.discard(made)

    async def cancel(self, group_ids: list[str]) -> None:
        """End the calls that these groups are part of: nobody waits for them any more."""
        await self._between_steps(lambda: self._cancel(frozenset(group_ids)))

    async def pull_weights(self, handle: WeightHandle) -> None:
        """Swap in published weights between two steps. Requests in flight go on with them, or are
        finished before, if `EngineConfig.drain` says so."""
        if handle.transport == "collective":
            await self._fetch(handle)
        if not self._config.drain:
            await self._between_steps(lambda: self._swap(handle))
            return
        self._open.clear()
        try:
            while self._in_flight:
                await asyncio.wait(set(self._in_flight))
            await self._between_steps(lambda: self._swap(handle))
        finally:
            self._open.set()

    async def sleep(self) -> int:
        """Give back the memory of weights and KV cache; returns how many bytes that were. Calls
        that are under way, and those that come before `wake`, get EngineAsleepError."""
        return await self._between_steps(self._sleep)

    async def wake(self, handle: WeightHandle) -> None:
        """Have weights again, those of the handle, and a KV cache. If they cannot be read, the
        engine sleeps on."""
        await self._between_steps(lambda: self._wake(handle))

    async def _fetch(self, handle: WeightHandle) -> None:
        """Have the ranks receive weights while the engine makes steps."""
        await self._between_steps(lambda: self._start_fetching(handle))
        while not await self._between_steps(self._has_fetched):
            await asyncio.sleep(FETCH_SECONDS)

    def close(self) -> None:
        """Stop the thread and vLLM; whoever still waits, or asks later, gets an error."""
        self._commands.put(None)
        self._thread.join()
        self._answer_late_commands()
        self._engine.engine_core.shutdown()

    async def _between_steps(self, command: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self._submit(command))

    def _submit(self, command: Callable[[], Any]) -> Future:
        done: Future = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return  # whoever asked has gone
            if self._dead is not None:
                done.set_exception(EngineDiedError(f"the engine died: {self._dead!r}"))
                return
            try:
                done.set_result(command())
            except BaseException as error:
                done.set_exception(error)

        self._commands.put(run)
        if not self._thread.is_alive():
            self._answer_late_commands()
        return done

    def _answer_late_commands(self) -> None:
        """The thread has ended and said why in `_dead`: commands now only hand that on."""
        with contextlib.suppress(queue.Empty):
            while True:
                if command := self._commands.get_nowait():
                    command()

    # ---- on the engine's thread ---------------------------------------------------------------

    def _run(self, started: Future) -> None:
        try:
            self._engine = build_llm_engine(self._model, self._config, self._tensor_parallel)
            self._tokenizer = self._engine.get_tokenizer()
            self._tensors = tensor_shapes(self._model)
            self._has_weights = has_weights(self._model)
            self._tied = self._engine.model_config.hf_config.tie_word_embeddings
            if self._config.return_routed_experts:
                self._routing = make_routing_source(self._engine, self._model)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        while True:
            # Blocks only when there is nothing to decode; a command (or close) unblocks it.
            while not self._slots or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    self._die(EngineDiedError("the engine was closed"))
                    return
                command()
            try:
                self._step()
            except BaseException as error:
                # The thread lives on, only to tell everyone who calls: nobody waits forever.
                self._die(error)

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished:
                self._finish(output)

    def _finish_batches(self) -> None:
        """Step until no batch is under way, and schedule none after them.

        On a GPU vLLM 0.32 schedules a batch before it has read the one before. One that is under
        way as weights are swapped would be thrown away, and fails an assertion if its routing is to
        be returned. Its own `pause_scheduler` does not wait for it in the process it is called in.
        """
        from vllm.v1.core.sched.interface import PauseState

        core = self._engine.engine_core.engine_core
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:
                self._step()
        finally:
            core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _add(
        self,
        call: _Call,
        prompts: list[Prompt],
        samplings: list[SamplingConfig],
        group_ids: list[str],
        first_samples: list[int],
    ) -> None:
        from vllm.exceptions import VLLMValidationError

        self._check_awake()
        if not self._has_weights:
            raise NoWeightsError(
                f"{self._model} has no weights: `pull_weights` with a handle of the trainer's"
            )
        try:
            together = zip(prompts, samplings, group_ids, first_samples, strict=True)
            for prompt_idx, (prompt, sampling, group_id, first) in enumerate(together):
                token_ids = self._check_prompt(prompt, prompt_idx, sampling)
                for sample in range(first, first + sampling.n):
                    request_id = str(next(self._ids))
                    params = self._sampling_params(sampling, group_id, sample)
                    prompt_ids = {"prompt_token_ids": token_ids}
                    vllm_id = self._engine.add_request(request_id, prompt_ids, params)
                    versions = [(0, self.policy_version)]
                    slot = _Slot(call, len(call.completions), prompt_idx, vllm_id, versions)
                    self._slots[request_id] = slot
                    call.completions.append(None)
                    call.request_ids.append(request_id)
        except BaseException as error:
            self._abort(call)
            if isinstance(error, VLLMValidationError):
                raise PromptError(f"prompt {prompt_idx}: {error}") from error
            raise
        call.missing = len(call.completions)
        if call.missing == 0:
            call.future.set_result([])

    def _check_prompt(self, prompt: Prompt, index: int, sampling: SamplingConfig) -> list[int]:
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise PromptError(f"prompt {index} is empty")
        vocab = self._engine.model_config.get_vocab_size()
        if bad := [i for i in ids if not 0 <= i < vocab]:
            raise PromptError(
                f"prompt {index} has token id {bad[0]}; the model knows 0..{vocab - 1}"
            )
        if len(ids) + sampling.max_tokens > self._config.max_model_len:
            # vLLM would silently cut the completion short.
            raise PromptError(
                f"prompt {index} has {len(ids)} tokens; with max_tokens = {sampling.max_tokens} "
                f"that exceeds max_model_len = {self._config.max_model_len}"
            )
        return ids

    def _sampling_params(self, sampling: SamplingConfig, group_id: str, sample: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
            seed=sample_seed(self._seed, group_id, sample) if sampling.temperature > 0 else None,
            logprobs=0 if sampling.logprobs else None,  # of the sampled token only
            flat_logprobs=True,  # in one list, not a dictionary for each token
            # Text is decoded once, at the end; only stop strings need it token by token.
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _finish(self, output: Any) -> None:
        slot = self._slots[output.request_id]
        call, made = slot.call, output.outputs[0]
        token_ids = list(made.token_ids)
        versions = slot.token_versions(len(token_ids))
        call.completions[slot.index] = Completion(
            policy_version=min(versions, default=self.policy_version),
            prompt_idx=slot.prompt_idx,
            prompt_token_ids=list(output.prompt_token_ids),
            text="",
            token_ids=token_ids,
            token_logprobs=None if made.logprobs is None else list(made.logprobs.logprobs),
            finish_reason=made.finish_reason,
            token_versions=versions if len(set(versions)) > 1 else None,
            routed_experts=self._routing.take(output) if self._routing else None,
        )
        call.missing -= 1
        completions = self._decoded(call) if call.missing == 0 else []
        # Not before: if anything above fails, whoever waits for this slot is told.
        del self._slots[output.request_id]
        if call.missing == 0 and not call.future.done():
            call.future.set_result(completions)

    def _decoded(self, call: _Call) -> list[Completion]:
        """All completions of a call with their texts. Together: one by one, decoding costs as much
        as an engine step."""
        completions = [c for c in call.completions if c is not None]
        texts = self._tokenizer.batch_decode(
            [c.token_ids for c in completions], skip_special_tokens=True
        )
        for completion, text in zip(completions, texts, strict=True):
            completion.text = text
        return completions

    def _abort(self, call: _Call) -> None:
        # The engine says nothing of an aborted request, so its slot is released here.
        for request_id in call.request_ids:
            self._slots.pop(request_id, None)
        self._engine.abort_request(call.request_ids)
        if self._routing:
            self._routing.drop(call.request_ids)

    def _cancel(self, names: frozenset[str]) -> None:
        for call in self._calls():
            if call.names & names:
                self._abort(call)
                if not call.future.done():
                    call.future.set_exception(RuntimeError("nobody waits for this any more"))

    def _start_fetching(self, handle: WeightHandle) -> None:
        check_model(handle, self._tensors, tied=self._tied)
        self._engine.collective_rpc("start_fetching", args=(handle,))

    def _has_fetched(self) -> bool:
        return all(self._engine.collective_rpc("has_fetched"))

    def _swap(self, handle: WeightHandle) -> None:
        self._check_awake()
        self._stage(handle)
        with self._dying("weights were swapped"):
            self._finish_batches()
            self._engine.collective_rpc("load_staged")
            # Cached prefixes and the KV of running requests were computed with the old weights.
            self._engine.reset_prefix_cache(reset_running_requests=True)
        self.policy_version, self._has_weights = handle.version, True
        # vLLM 0.32: the scheduler, in this process, has every request that is not finished.
        unfinished = self._engine.engine_core.engine_core.scheduler.requests
        for slot in self._slots.values():
            slot.versions.append((unfinished[slot.vllm_id].num_output_tokens, handle.version))

    def _stage(self, handle: WeightHandle) -> None:
        """Open and check weights; nothing is touched yet: if this fails, all stays as it is."""
        check_model(handle, self._tensors, tied=self._tied)
        try:
            self._engine.collective_rpc("stage_weights", args=(handle,))
        except BaseException:
            self._engine.collective_rpc("drop_staged")  # of ranks that did not fail
            raise

    @contextlib.contextmanager
    def _dying(self, when: str) -> Iterator[None]:
        """End the engine if the block fails: the model may be half new and half old, and better no
        answer than a wrong one."""
        try:
            yield
        except BaseException as error:
            self._die(error)
            raise EngineDiedError(f"the engine died as {when}: {error!r}") from error

    def _sleep(self) -> int:
        if self.state == "asleep":
            return 0
        if not self._config.can_sleep:  # on a GPU its memory is of the wrong allocator
            raise ValueError("generator.engine.can_sleep is off: an engine that sleeps needs it")
        for call in self._calls():
            self._abort(call)
            if not call.future.done():
                call.future.set_exception(EngineAsleepError("the engine was put to sleep"))
        with self._dying("it went to sleep"):
            self._finish_batches()
            held = sum(self._engine.collective_rpc("memory_in_use"))
            self._engine.collective_rpc("forget_served")
            # Level 2 keeps no copy of the weights: newer ones come before they are used again.
            self._engine.sleep(level=2)
            self.state = "asleep"
            return held - sum(self._engine.collective_rpc("memory_in_use"))

    def _wake(self, handle: WeightHandle) -> None:
        if self.state == "awake":  # whoever woke it did not wait for the answer
            self._swap(handle)
            return
        with self._dying("it woke up"):
            self._engine.wake_up(["weights"])
        try:
            self._stage(handle)
        except BaseException:
            self._engine.sleep(level=2)
            raise
        with self._dying("it woke up"):
            self._engine.collective_rpc("load_staged")
            # The cache last: loading needs memory beside the weights.
            self._engine.wake_up(["kv_cache"])
        self.policy_version, self._has_weights = handle.version, True
        self.state = "awake"

    def _check_awake(self) -> None:
        if self.state == "asleep":
            raise EngineAsleepError(
                "the engine is asleep: it has no weights; `wake` it with those of a handle"
            )

    def _calls(self) -> list[_Call]:
        """All calls that have a request in flight."""
        return list({id(slot.call): slot.call for slot in self._slots.values()}.values())

    def _die(self, cause: BaseException) -> None:
        """Fail whoever waits, and everyone who asks from now on."""
        self._dead = cause
        for slot in self._slots.values():
            if not slot.call.future.done():
                slot.call.future.set_exception(EngineDiedError(f"the engine died: {cause!r}"))
        self._slots.clear()
