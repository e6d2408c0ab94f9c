"""What a pipeline may do when the host of a stage is lost, as courses of pauses and speeds. Pure.

- The model is cut anew at once, and blocks move in the pause.
- The stage is kept for its host: no block moves, and its replica computes nothing until the host is back.
- The stage is kept until others have copies of its blocks, which are made while training goes on. Then it is given up:
  that is a second pause, in which only those blocks move that were not copied in time.

The first pause is the same in all of them, but for the blocks that move in it. So the choice does not depend on how
busy the machine was when pauses of one kind, or of the other, were measured.
"""

from collections.abc import Mapping

from resilient_jax.policy.score import Phase
from resilient_jax.protocol.recovery_records import TimedChange
from resilient_jax.protocol.state_records import COPY_TIMEOUT_S, StageLoss


def price_cut(stage: StageLoss, present: float, seconds: Mapping[TimedChange, float]) -> Phase:
    """Return what follows if the model is cut anew at once.

    Args:
        present: the speed before the loss, as a part of the speed of all hosts of the job.
    """
    return Phase(pause_s=_find_pause_s(seconds) + stage.move_s, speed=present * stage.cut)


def price_kept(stage: StageLoss, present: float, seconds: Mapping[TimedChange, float]) -> Phase:
    """Return what follows if the stage is kept, as long as it is. Arguments as of `price_cut`."""
    return Phase(pause_s=_find_pause_s(seconds), speed=present * stage.kept)


def price_copied(
    stage: StageLoss, present: float, seconds: Mapping[TimedChange, float]
) -> tuple[Phase, Phase]:
    """Return what follows if the stage is kept until its blocks are copied. Arguments as of `price_cut`."""
    copied_s = min(stage.move_s, COPY_TIMEOUT_S)
    kept = price_kept(stage, present, seconds)
    return (
        Phase(pause_s=kept.pause_s, speed=kept.speed, training_s=copied_s),
        Phase(
            pause_s=seconds[TimedChange.REDIVIDE] + stage.move_s - copied_s,
            speed=present * stage.cut,
        ),
    )


def find_stage_break_even_s(stage: StageLoss, present: float, seconds: Mapping[TimedChange, float]) -> float:
    """Return when a stage that is kept for its host has cost as much as the cheaper way to do without it; infinite: it
    costs nothing. Arguments as of `price_cut`.

    To give it up then is 2-competitive: whenever the host is back, at most about twice the least is lost.
    """
    slower = present * (stage.cut - stage.kept)
    if slower <= 0:
        return float("inf")
    # T = (what the other way loses) / (speed lost); losses as time at the speed of all hosts.
    copied, divided = price_copied(stage, present, seconds)
    lost_at_once_s = stage.move_s * present * stage.cut
    lost_later_s = divided.pause_s * divided.speed + slower * (copied.training_s or 0.0)
    return min(lost_at_once_s, lost_later_s) / slower


def _find_pause_s(seconds: Mapping[TimedChange, float]) -> float:
    """Return the pause after a loss without the blocks that move in it; one of them has none, the other may have."""
    return min(seconds[TimedChange.SHRINK], seconds[TimedChange.KEEP_STAGES])
