"""Groups that the stream discards, as records: every rollout of theirs is accounted for."""

from torchtitan_rl.actors.interfaces import RewardError
from torchtitan_rl.core.types import Status
from torchtitan_rl.rollout.loop import RolloutLoop
from torchtitan_rl.rollout.record import RolloutRecord, lost_records
from torchtitan_rl.rollout.stream import RolloutStream
from torchtitan_rl.rollout.stream_plan import Discarded


def take_discarded_records(
    stream: RolloutStream[RolloutLoop, list[RolloutRecord]] | None,
) -> list[RolloutRecord]:
    """The rollouts of groups that ended since the last call, and do not train."""
    discarded = stream.take_discarded() if stream else []
    return [record for group in discarded for record in discarded_records(group)]


def discarded_records(group: Discarded[RolloutLoop, list[RolloutRecord]]) -> list[RolloutRecord]:
    """The rollouts of a discarded group, each with the reason why it does not train."""
    if group.kind == "not_useful":
        return [record.discarded(group.reason) for record in group.result or ()]
    status = Status(group.kind)
    if group.result is not None:
        return [record.discarded(group.reason, status) for record in group.result]
    # The error of a reward function names task and group itself.
    reason = str(group.error) if isinstance(group.error, RewardError) else group.reason
    return [
        record
        for given_up in group.work.given_up(status, reason)
        for record in lost_records(given_up.prompt, given_up.rollouts)
    ]
