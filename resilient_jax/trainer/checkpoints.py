"""Options for checkpoints of the training state."""

import dataclasses
from pathlib import Path

from resilient_jax.argument_checks import check_fields, refuse_unknown_options
from resilient_jax.errors import CallerError
from resilient_jax.trainer.directory_checks import check_no_file, expand_home


@refuse_unknown_options
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """When to save the training state, in Orbax's format.

    One host copies the state to its memory, and a process on that host writes the copy while training continues; of a
    pipeline each host copies and writes the layers that it has, into one checkpoint. If that save is in flight when the
    next one is due, the next one is skipped, which is an event; the last one is waited for.

    A job without a committed state resumes from the newest checkpoint that every host can read, saved by this class or
    by a plain `CheckpointManager(directory)`, which also restores what this class saved; so does a running job whose
    state is lost in the memory of all hosts (`state_loss_policy`). Each checkpoint that cannot be read is an event; if
    none can be read, that is an error. A host reads of each array what its devices need.

    Attributes:
        directory: the same files on every host (a network or cluster file system), unless there is only one host; `~`
            is the user's home folder.
        interval_steps: steps between two checkpoints; the final state is saved at whichever step training ends.
        max_to_keep: how many of the newest checkpoints to keep.
        timeout_s: seconds that writing or reading a checkpoint may take; after that the save or load has failed. A
            failed save is an event. The last save is made once more when it fails; if that fails, too, an error is
            logged, and the model is in the result of `fit`, with `checkpoint_failure`. A pipeline without
            `gather_result` ends with `CheckpointFailed`.

    Raises:
        CallerError: an integer is below 1, the timeout is not above 0, or the directory, or one above it, is a file.
    """

    directory: str | Path
    interval_steps: int = 100
    max_to_keep: int = 2
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "directory", expand_home(self.directory))
        check_no_file(self.directory)
        if self.interval_steps < 1 or self.max_to_keep < 1:
            raise CallerError(
                f"checkpoints: found interval_steps={self.interval_steps}, "
                f"max_to_keep={self.max_to_keep}, expected at least 1 of each"
            )
        if not self.timeout_s > 0:
            raise CallerError(f"checkpoints: found timeout_s={self.timeout_s}, expected a number above 0")

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether to save when `step` of `num_steps` steps are committed."""
        return step % self.interval_steps == 0 or step == num_steps
