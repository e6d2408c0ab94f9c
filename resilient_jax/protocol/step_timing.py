"""What a worker measured of one step, in band: hosts tell it to each other, and the first one feeds `health` with it.

    step = microbatches of this host, then the reduction, in which it waits for the others, then the update

Only the first and the last are a host's own: in the reduction all wait for the slowest (no host's step time names it).
"""

import msgspec


class ReplicaWork(msgspec.Struct, frozen=True, array_like=True):
    """Microbatches of a step that one replica of a host computed, from the first's start to the last's end.

    Attributes:
        slot: index of the host's replica.
        microbatches: number of microbatches, at least 1.
        tokens: N, the sum of the lengths of the microbatches' documents and padding; the number of microbatches where
            lengths are unknown.
        squares: the sum of the squares of these lengths; 0 where lengths are unknown.
        seconds: from begin to end, without waits for other hosts.
        input_s: the part of `seconds` in which the replica's thread waited for data.
    """

    slot: int
    microbatches: int
    tokens: float
    squares: float
    seconds: float
    input_s: float = 0.0


class StepTiming(msgspec.Struct, frozen=True, array_like=True):
    """One step of a host.

    Attributes:
        works: work of the host's replicas, one or several for each. Empty if the host computed no replica alone: in a
            replica on several hosts each host waits for the slowest.
        wait_s: time from the end of the host's last microbatch to the end of the reduction.
        update_s: time from the end of the reduction until the updated state is computed.
        is_disturbed: whether the times are not those of an ordinary step: programs were compiled or loaded, a step was
            repeated or finished after a failure.
        received_bytes: bytes of boundary values and sums that came by mail since the step before, in a pipeline.
        received_s: sum of the times that these were under way: for each value from its first byte to its last, as the
            receiver saw them.
    """

    step: int
    works: tuple[ReplicaWork, ...] = ()
    wait_s: float = 0.0
    update_s: float = 0.0
    is_disturbed: bool = False
    received_bytes: float = 0.0
    received_s: float = 0.0
