"""A worker that was left out of a generation, in the records of the store."""

import msgspec

from resilient_jax.ids import GenerationNumber, HostName, Incarnation


class DroppedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that was left out, and may yet enter a world that it was sent into.

    Attributes:
        host: the worker's host.
        incarnation: the number of the worker's start; a later start on this host has a greater one.
        required_generation: the worker may join again only after it has answered this generation or a later one.
    """

    host: HostName
    incarnation: Incarnation
    required_generation: GenerationNumber
