"""A digest of all weights of a model whose hosts each have some of them."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from resilient_jax.errors import InternalError
from resilient_jax.host_exchange.step_mail import StepMail
from resilient_jax.ids import HostName
from resilient_jax.pipeline.block_state import UnitState
from resilient_jax.state.array_digest import digest_tree
from resilient_jax.transport.mail_protocol import MailKind

DIGESTS_MAIL: Final = MailKind("digests")
"""The digests of the weights that a host has."""


class WeightDigests(msgspec.Struct, frozen=True):
    """What a host says about its weights.

    Attributes:
        digests: by the name of the weight.
    """

    digests: Mapping[str, str]


def digest_weights(
    mail: StepMail, own: HostName, hosts: Sequence[HostName], states: Mapping[int, UnitState]
) -> str:
    """Return the SHA-256, in hex, of the digests of all weights in the order of their names. Every host must call this.

    It does not depend on which host has what. Only digests go from host to host.

    Args:
        mail: mail of this generation, at the step of the weights.
        hosts: all that take part, in the same order everywhere.
        states: unit number to state, of the units of this host.

    Raises:
        PeerUnreachable: a host is lost, or late.
        InternalError: two hosts have other bits of one weight.
    """
    mine = {name: digest_tree(value) for state in states.values() for name, value in state.weights.items()}
    told = mail.make_exchange(hosts, own, DIGESTS_MAIL).gather_by_host(WeightDigests(mine))
    found: dict[str, tuple[HostName, str]] = {}
    for host in hosts:
        for name, digest in told[host].digests.items():
            first, known = found.setdefault(name, (host, digest))
            if known != digest:
                raise InternalError(
                    f"{name}: found {known} on {first} and {digest} on {host}, expected the same bits. Examine the "
                    "processors and memory of both hosts"
                )
    whole = hashlib.sha256()
    for name, (_, digest) in sorted(found.items()):
        whole.update(f"{name} {digest}\n".encode())
    return whole.hexdigest()
