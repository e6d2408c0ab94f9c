"""What the hosts of a generation tell each other: one message from each, for all of them.

See README.md in this folder.
"""

from resilient_jax.host_exchange.collective_exchange import (
    AddingWorld,
    CollectiveExchange,
    compute_vector_size,
)
from resilient_jax.host_exchange.messages import (
    FLOAT_BYTES,
    MAX_INTEGER_BYTES,
    SMALL_BYTES,
    HostExchange,
    MailAddress,
    gather_mail_addresses,
)
from resilient_jax.host_exchange.step_mail import MailExchange

__all__ = [
    "FLOAT_BYTES",
    "MAX_INTEGER_BYTES",
    "SMALL_BYTES",
    "AddingWorld",
    "CollectiveExchange",
    "HostExchange",
    "MailAddress",
    "MailExchange",
    "compute_vector_size",
    "gather_mail_addresses",
]
