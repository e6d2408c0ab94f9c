"""What a worker does at a moment, and what it reports of a task that takes too long."""

import enum

import msgspec


class WorkerTask(enum.StrEnum):
    """What a worker's main thread is at work on; the value is how messages name it."""

    INPUT = "input"
    """It waits for a microbatch of the data source."""
    COMPUTE = "compute"
    """It computes microbatches on this host's own devices."""
    SUM = "sum"
    """It has entered a collective: it waits for the other hosts."""
    COMMIT = "commit"
    """It waits for the update, whose result is to be committed."""
    SNAPSHOT = "snapshot"
    """It copies the state to the memory of the snapshot server."""
    CHECKPOINT = "checkpoint"
    """It saves a checkpoint, or waits until one is on storage."""
    EVALUATION = "evaluation"
    """It evaluates; within that, it reads input, computes and sums."""
    RESTORE = "restore"
    """It makes or restores the state that a generation begins with."""
    FORMING = "forming"
    """It joins the world of a generation, and fetches the state."""
    USER_CODE = "user code"
    """It runs the script's own code."""
    STORAGE = "storage"
    """It waits for the storage process, which has a timeout of its own."""
    PAUSED = "paused"
    """It waits for the order that ends a pause."""


class OverdueTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task that takes longer than its deadline, as a worker's guard thread saw it.

    Attributes:
        task: what the worker is at work on.
        step: the step that the worker is in.
        place: where the worker's thread is, such as "`load_batch`, line 40 of train.py".
        silent_s: how long the task had made no progress, in seconds, when it was reported; reported again when doubled.
        deadline_s: deadline that was exceeded, in seconds; of a sum, one that may not be exceeded yet.
    """

    task: WorkerTask
    step: int
    place: str
    silent_s: float
    deadline_s: float

    def describe(self) -> str:
        """Return a description such as "its main thread is in `load_batch`, line 40 of train.py (input, for 9 s)"."""
        return f"its main thread is in {self.place} ({self.task}, for {self.silent_s:.0f} s)"
