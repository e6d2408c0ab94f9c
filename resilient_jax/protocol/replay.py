"""The order to compute a step again, which `resilient-jax replay` gives a script in its environment.

The script then trains on this machine alone, from a checkpoint before the step, writes digests instead of checkpoints,
logs and reports, and ends after the step.
"""

import os

import msgspec

from resilient_jax.protocol.message_decoding import decode_message

REPLAY_VARIABLE = "RESILIENT_JAX_REPLAY"


class ReplayOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What to compute again.

    Attributes:
        step: step that is asked for: the replay begins with a checkpoint of at most so many steps.
        output: path of the file that digests are written to.
        from_start: whether to begin with the initial state if there is no such checkpoint.
    """

    step: int
    last_step: int
    output: str
    from_start: bool = False


_DECODER = msgspec.json.Decoder(ReplayOrder)


def encode_order(order: ReplayOrder) -> str:
    """Return the value of `REPLAY_VARIABLE`."""
    return msgspec.json.encode(order).decode()


def find_replay_order() -> ReplayOrder | None:
    """Return the order that this process was started with; None: it trains.

    Raises:
        MessageError: the environment variable has something else.
    """
    encoded = os.environ.get(REPLAY_VARIABLE)
    if encoded is None:
        return None
    return decode_message(_DECODER, encoded.encode(), f"the environment variable {REPLAY_VARIABLE}")
