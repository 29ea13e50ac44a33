"""Groups of rollouts, started ahead of the step that trains them, and never too far ahead.

D is the number of training steps that are done and whose weights the generators serve; step t
starts when D is t. S is max_offpolicy_steps, P prompts_per_step.

Every group belongs to a step: step k trains groups of step k and no others, and a group of step k
starts only while k <= D + S. Two bounds follow:

    age of a trained group      =  k - (D at its start)  <=  S
    accepted + running groups  <=  (S + D + 1) * P

The first is the rule itself, read at the start of the group. The second: only the steps up to
D + S have groups, and `accepted + running` of one step never exceeds P. (Steps before
`first_step` count as accepted; what `oversample` adds comes on top.)

The second bound alone would not give the first: a slow group could be overtaken by later ones until
it is too old. So step t has to wait for all groups started when D was t - S. That costs nothing: a
stream that keeps the second bound full has (S + (t - S) + 1) * P = (t + 1) * P groups accepted or
running when D is t - S, and so many are all that steps 0 to t train. From step S on, then, the two
bounds leave no choice; before, the order is ours.

Which groups a step tries is a function of the step and of how its groups end, for every S: a
resumed run, and a run with another S, sees the same prompts. (Oversampling trades that for speed.)
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Generic, get_args

from torchtitan_rl.config.stream import StreamConfig
from torchtitan_rl.core.errors import describe_error
from torchtitan_rl.rollout.stream_plan import (
    Discarded,
    Kind,
    Plan,
    Result,
    Running,
    Work,
    index_name,
)


class RolloutStream(Generic[Work, Result]):
    """Starts groups, replaces those that fail, and gives each step the groups it trains.

    `start(index)` makes a group's work, `play(work)` does it: it rolls the group out and returns
    what became of it. A group is one failure when `play` raises or takes too long.
    `finish(result)`, if given, turns it into what a step gets; an error there is no chance failure,
    and ends the stream. With `useful`, results that are not are discarded: dynamic sampling.
    `end_step` is the number of steps of the run: nothing is started for later ones.

    `started == running + waiting + sum(counts.values())`, always: a group ends exactly once.

    Example:
        async with RolloutStream(config, start=make_group, play=roll_out_and_grade) as stream:
            for step in range(steps):
                train(await stream.batch(step))
                stream.advance(step + 1)
    """

    def __init__(
        self,
        config: StreamConfig,
        *,
        start: Callable[[int], Work],
        play: Callable[[Work], Awaitable[Any]],
        finish: Callable[[Any], Result] | None = None,
        useful: Callable[[Result], bool] | None = None,
        first_step: int = 0,
        end_step: int | None = None,
    ) -> None:
        self.config, self._start_work, self._play = config, start, play
        self._finish, self._useful = finish or (lambda result: result), useful
        self.steps_done = self._next = self._planned = first_step
        self.started = 0
        self.counts: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
        self._plans: dict[int, Plan[Work, Result]] = {}
        self._end_step = end_step
        self._failures_in_a_row = 0
        self._discarded: list[Discarded[Work, Result]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._wake: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._error_seen = False

    # ---- what the controller calls ------------------------------------------------------------

    async def batch(self, step: int) -> list[Result]:
        """The results that `step` trains, in the order of their indices. They count as trained.

        As many as prompts_per_step, or fewer if the step has tried all it may. If the wait is
        cancelled, nothing is lost: call again.
        """
        if step != self._next or step == self._end_step:
            end = "" if self._end_step is None else f" of {self._end_step}"
            raise ValueError(f"step {step} is not next to train: that is step {self._next}{end}")
        self._open()
        plan = self._plans.get(step)
        if self._error is None and not (plan and plan.complete(self.config)):
            await self._wait()
        if self._error is not None:
            self._error_seen = True
            raise self._error
        plan = self._plans.pop(step)
        self._next += 1
        self.counts["trained"] += len(plan.ready)
        return [plan.ready[index][1] for index in sorted(plan.ready)]

    def advance(self, steps_done: int) -> None:
        """So many training steps are done, and their weights are with the generators."""
        if steps_done != self.steps_done + 1 or steps_done > self._next:
            raise ValueError(
                f"{steps_done} steps cannot be done after {self.steps_done}: steps are done one by "
                f"one, after their batch (the next batch is of step {self._next})"
            )
        self.steps_done = steps_done
        self._open()

    def fail(self, error: BaseException) -> None:
        """Stop the stream, as the weights of a step will not come; `batch` raises the error."""
        self._break(error)

    def take_discarded(self) -> list[Discarded[Work, Result]]:
        """Groups that ended since the last call and do not train: call it every step, or they pile
        up."""
        taken, self._discarded = self._discarded, []
        return taken

    @property
    def running(self) -> int:
        return sum(len(plan.running) for plan in self._plans.values())

    @property
    def waiting(self) -> int:
        """Groups that are ready, and not yet trained."""
        return sum(len(plan.ready) for plan in self._plans.values())

    async def close(self) -> None:
        """Cancel all groups, and wait until they have cleaned up. Can be called twice."""
        if self._error is not None and not self._error_seen:
            _report("the rollout stream was closed before a step met its error", self._error)
        self._error_seen = True
        self._break(RuntimeError("the rollout stream is closed"))
        for plan in self._plans.values():
            for group in list(plan.running.values()):
                self._cancel(group, "the stream was closed")
            for index, (work, result) in plan.ready.items():
                reason = "the stream was closed"
                self._discard(Discarded(work, index, plan.step, "cancelled", reason, result))
            plan.ready.clear()
        seconds = self.config.deadline_seconds
        if self._tasks and (late := (await asyncio.wait(self._tasks, timeout=seconds))[1]):
            names = ", ".join(sorted(task.get_name() for task in late)[:8])
            raise TimeoutError(f"waited {seconds:.0f} s for {len(late)} groups to end: {names}")

    async def __aenter__(self) -> "RolloutStream[Work, Result]":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- starting -----------------------------------------------------------------------------

    def _open(self) -> None:
        """Plan the steps that may have groups by now, and start these."""
        last = self.steps_done + self.config.max_offpolicy_steps
        while self._error is None and self._planned <= last and self._planned != self._end_step:
            plan: Plan[Work, Result] = Plan(self._planned)
            self._plans[self._planned] = plan
            self._planned += 1
            self._fill(plan)

    def _fill(self, plan: Plan[Work, Result]) -> None:
        while self._error is None and plan.wants_more(self.config):
            index = self.config.index(plan.step, plan.starts)
            try:
                work = self._start_work(index)
            except Exception as error:
                self._break(error)
                return
            self._run(plan, index, work)

    def _run(self, plan: Plan[Work, Result], index: int, work: Work) -> None:
        loop = asyncio.get_running_loop()
        name = f"group {index_name(index)} of step {plan.step}"
        task = loop.create_task(self._played(work), name=name)
        timer = loop.call_later(self.config.timeout_seconds, self._time_out, plan, index)
        group = Running(work, index, plan, self.steps_done, loop.time(), task, timer)
        # A callback, as a task that is cancelled before its first turn runs none of its code.
        task.add_done_callback(partial(self._finished, group))
        self._tasks.add(task)
        plan.running[index] = group
        plan.starts += 1
        self.started += 1

    async def _played(self, work: Work) -> Any:
        return await self._play(work)

    # ---- ending -------------------------------------------------------------------------------

    def _finished(self, group: Running[Work, Result], task: asyncio.Task[Any]) -> None:
        """The task of a group is over, however it ended."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if group.index not in group.plan.running:  # cancelled by us, and accounted for then
            if error is not None and task.cancelling():
                _report(f"{task.get_name()} raised while it was cancelled", error)
        elif task.cancelled() and task.cancelling():
            self._leave(group, "cancelled", "from outside the stream")
            self._break(RuntimeError(f"{task.get_name()} was cancelled from outside the stream"))
        elif task.cancelled():
            self._fail(group, "failed", "play was cancelled from within")
        elif error is not None:
            self._fail(group, "failed", describe_error(error), error)
        else:
            self._succeed(group)

    def _succeed(self, group: Running[Work, Result]) -> None:
        try:
            result = self._finish(group.task.result())
            useful = self._useful is None or self._useful(result)
        except Exception as error:
            self._leave(
                group, "failed", f"could not tell whether it is useful: {describe_error(error)}"
            )
            self._break(error)
            return
        self._failures_in_a_row = 0
        if useful:
            self._leave(group)
            group.plan.ready[group.index] = (group.work, result)
        else:
            self._leave(group, "not_useful", "not useful", result=result)
        self._go_on(group.plan)

    def _time_out(self, plan: Plan[Work, Result], index: int) -> None:
        group = plan.running[index]
        if not group.task.done():  # else it was in time, and `_finished` is about to be called
            reason = f"took longer than {self.config.timeout_seconds:g} s"
            self._fail(group, "timed_out", reason)
            group.task.cancel()

    def _fail(
        self,
        group: Running[Work, Result],
        kind: Kind,
        reason: str,
        cause: BaseException | None = None,
    ) -> None:
        self._leave(group, kind, reason, error=cause)
        group.plan.failures += 1
        self._failures_in_a_row += 1
        if not isinstance(cause, Exception | None):  # SystemExit and the like
            self._break(cause)
        elif self._failures_in_a_row >= self.config.failures_allowed:
            last = f"the last of them {group.task.get_name()}: {reason}"
            error = RuntimeError(f"{self._failures_in_a_row} groups failed in a row, {last}")
            error.__cause__ = cause
            self._break(error)
        self._go_on(group.plan)

    def _cancel(self, group: Running[Work, Result], reason: str) -> None:
        # Accounted for now: a group that ignores its cancellation must not keep its slot.
        stopped = group.task.cancel() or group.task.cancelled()
        if stopped or (error := group.task.exception()) is None:
            self._leave(group, "cancelled", reason)
        else:
            self._leave(group, "failed", describe_error(error), error=error)

    def _leave(
        self,
        group: Running[Work, Result],
        kind: Kind | None = None,
        reason: str = "",
        *,
        result: Result | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Free the group's slot. Without a kind it goes on to be trained."""
        group.timer.cancel()
        del group.plan.running[group.index]
        if kind:
            step = group.plan.step
            self._discard(Discarded(group.work, group.index, step, kind, reason, result, error))

    def _discard(self, group: Discarded[Work, Result]) -> None:
        self.counts[group.kind] += 1
        self._discarded.append(group)

    def _go_on(self, plan: Plan[Work, Result]) -> None:
        """A group has ended: start another one, or see that the step has enough."""
        if len(plan.ready) == self.config.prompts_per_step:
            for group in list(plan.running.values()):
                self._cancel(group, f"step {plan.step} had enough groups without it")
        self._fill(plan)
        if plan.step == self._next and plan.complete(self.config):
            self._rouse()

    # ---- waiting ------------------------------------------------------------------------------

    def _break(self, error: BaseException) -> None:
        """Start nothing any more, and let `batch` raise the first error."""
        if self._error is None:
            self._error = error
        self._rouse()

    def _rouse(self) -> None:
        if self._wake and not self._wake.done():
            self._wake.set_result(None)

    async def _wait(self) -> None:
        """Wait until the next step is complete or the stream broken."""
        if self._wake:
            raise RuntimeError(f"the batch of step {self._next} is already being waited for")
        self._wake = asyncio.get_running_loop().create_future()
        seconds = self.config.deadline_seconds
        try:
            if not (await asyncio.wait({self._wake}, timeout=seconds))[0]:
                raise TimeoutError(f"step {self._next} waited {seconds:.0f} s: {self._state()}")
        finally:
            self._wake = None

    def _state(self) -> str:
        """The groups that the next step waits for, for the message of a deadline."""
        if plan := self._plans.get(self._next):
            return plan.state(self.config, now=asyncio.get_running_loop().time())
        needed = self._next - self.config.max_offpolicy_steps
        return f"its groups start after {needed} steps, and {self.steps_done} are done"


def _report(message: str, error: BaseException) -> None:
    # To the loop, which logs it: nobody is left to raise it to.
    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})
