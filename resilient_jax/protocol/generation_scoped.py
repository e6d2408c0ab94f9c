"""The moments of a generation for the parts of a worker that outlive it: one protocol for all of them.

Parts are in many rooms; `worker.generation_parts` has their one list, and its order. No part is told of a return to
devices: where arrays go is known only in the train function, which places them when it asks for them.
"""

import dataclasses

from resilient_jax.ids import GenerationNumber
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.snapshots import SnapshotId


@dataclasses.dataclass(slots=True, kw_only=True)
class GenerationEnding:
    """How a generation ended on this host, and what parts have left of it, which they write here.

    Attributes:
        is_intact: whether the generation ended without an interruption or a failure.
        is_flushed: whether a snapshot of the committed state is taken, where hosts that stay lack some of it.
        is_copy_needed: whether the copy for a snapshot that is in progress is to be finished, if it does not take long.
        flushed: the snapshot that was taken at the end, complete on all hosts.
        copied: the newest snapshot of the generation of which this host's part is complete.
    """

    generation: GenerationNumber
    is_intact: bool
    is_flushed: bool = False
    is_copy_needed: bool = False
    flushed: SnapshotId | None = None
    copied: SnapshotId | None = None


class GenerationScoped:
    """Does nothing at any moment of a generation; subclasses override the moments that concern them.

    The moments, in the order in which they come: `begin_generation`; `keep_devices` or `leave_devices`; `unwind`, if
    the world was formed; `end_generation`, in any case.
    """

    def begin_generation(self, generation: Generation) -> None:
        """Forget the generation before: this worker is ordered into another one, to train or to take a seat of it."""

    def keep_devices(self, generation: Generation) -> None:
        """Have what this host needs in a generation that is formed in place: what is on devices stays there."""

    def leave_devices(self, generation: Generation | None) -> None:
        """Let go of all devices; what is needed of the arrays there moves to host memory.

        Args:
            generation: the generation whose world this worker joins next; None: it takes a seat while others train.
        """

    def unwind(self) -> None:
        """Stop what others may wait for, or what is for likely next worlds: the train function has returned or raised.

        Whatever it raised is reported after this.
        """

    def end_generation(self, ending: GenerationEnding) -> None:
        """Release what is of this generation alone; after this the worker reports that it is idle."""
