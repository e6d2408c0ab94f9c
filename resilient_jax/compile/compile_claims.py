"""Which host compiles a program: the decisions of the host that owns the program's key. Pure.

Rules:
- The first host that asks for a program that no host has gets the claim: it compiles, all others wait.
- A claim is a lease: its holder renews it while it compiles. A claim that was not renewed goes to the next host that
  asks, so a host that died or was stopped while compiling holds up the others for `LEASE_S` at most.
- Training does not wait for a compilation in the background of another host: it takes over the claim.
- A claim ends with its generation: the claims of hosts that are gone are free when the next generation begins.
- A program that was compiled but could not be kept is compiled by all hosts that need it, at the same time.
"""

import enum
from collections.abc import Collection
from typing import Final

import msgspec

from resilient_jax.ids import GenerationNumber, HostName

LEASE_S: Final = 10.0
"""How long a claim lasts without a renewal: four intervals of renewal, so that a busy machine loses no claim."""


class Verdict(enum.StrEnum):
    """What a host that lacks a program does."""

    COMPILE = "compile"
    WAIT = "wait"


class Claimant(msgspec.Struct, frozen=True, kw_only=True):
    """A host that needs a program.

    Attributes:
        generation: generation that the host trains in.
        endpoint: address where the host serves its programs.
        is_ahead: whether the host compiles in the background.
    """

    host: HostName
    generation: GenerationNumber
    endpoint: str
    is_ahead: bool = False


class CompileClaims:
    """The claims on the programs that this host owns, and where finished ones are."""

    def __init__(self) -> None:
        self._claims: dict[str, tuple[Claimant, float]] = {}
        """By key: the host that compiles, and when its claim expires."""
        self._holders: dict[str, str] = {}
        """By key: the endpoint of a host that has the program."""
        self._unshared: set[str] = set()
        """Keys of programs that no host could keep."""

    def drop_older(self, number: GenerationNumber, endpoints: Collection[str]) -> None:
        """Drop the claims of older generations, and what is known of hosts that are not among `endpoints`."""
        self._claims = {key: found for key, found in self._claims.items() if found[0].generation >= number}
        self._holders = {key: where for key, where in self._holders.items() if where in endpoints}
        self._unshared.clear()

    def claim(self, key: str, asker: Claimant, now_s: float) -> Verdict:
        """Return what a host does that has not found the program anywhere."""
        if key in self._unshared:
            return Verdict.COMPILE
        if key in self._claims:
            current, expires_s = self._claims[key]
            is_held = current.host != asker.host and now_s < expires_s
            takes_over = current.is_ahead and not asker.is_ahead
            if is_held and not takes_over:
                return Verdict.WAIT
        self._claims[key] = (asker, now_s + LEASE_S)
        return Verdict.COMPILE

    def renew(self, key: str, host: HostName, now_s: float) -> None:
        """Extend a host's claim, unless another host has it by now."""
        if key in self._claims and self._claims[key][0].host == host:
            self._claims[key] = (self._claims[key][0], now_s + LEASE_S)

    def finish(self, key: str, claimant: Claimant, *, is_kept: bool) -> None:
        """End the claim: the program is at the claimant, if it `is_kept`."""
        if is_kept:
            self._holders[key] = claimant.endpoint
        else:
            self._unshared.add(key)
        self._claims.pop(key, None)

    def find_holder(self, key: str) -> str | None:
        """Return the endpoint of a host that has the program; None: no host is known."""
        return self._holders.get(key)
