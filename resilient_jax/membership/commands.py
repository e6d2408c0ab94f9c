"""What the rules of membership command; the leader's shell carries it out. Pure."""

import dataclasses

from resilient_jax.ids import HostName
from resilient_jax.membership.world_formation import StartCoordinationService
from resilient_jax.protocol.generation import Generation


@dataclasses.dataclass(frozen=True, slots=True)
class PublishGeneration:
    """Write this generation to the store, fenced by leadership and by the generation before."""

    generation: Generation


@dataclasses.dataclass(frozen=True, slots=True)
class QuarantineHost:
    """Write a host's `QuarantineRecord` to the store, before the generation without it.

    Attributes:
        reason: text for people.
        num_before: how often a slow host was taken out before as a slow one: the quarantine lasts twice as long each
            time. 0 for another cause.
    """

    host: HostName
    reason: str
    num_before: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineDevice:
    """Write a device's `DeviceQuarantineRecord` to the store: its host's agent starts the worker again without it.

    Attributes:
        host: host of the device; the host stays a member.
        device: number of the device on its host, from 0.
        uuid: id of a GPU; empty: the number says which device is meant.
        reason: text for people.
        num_before: how often the device was taken out before as a slow one: the quarantine lasts twice as long each
            time.
    """

    host: HostName
    device: int
    uuid: str
    reason: str
    num_before: int


MembershipCommand = PublishGeneration | StartCoordinationService | QuarantineHost | QuarantineDevice
