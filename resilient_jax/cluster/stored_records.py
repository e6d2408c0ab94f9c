"""The records of a job in the store, decoded. What else writes there is refused: no agent can follow it."""

from typing import Final, TypeVar

import msgspec

from resilient_jax.errors import JoinRefused, MessageError
from resilient_jax.protocol.generation_change import GenerationChange
from resilient_jax.protocol.job_records import JobRecord, ScriptRecord
from resilient_jax.protocol.leader_record import LeaderRecord
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord, HostLosses, QuarantineRecord
from resilient_jax.protocol.records import Generation, HostStatus
from resilient_jax.store.interface import KeyValue

ENCODER: Final = msgspec.msgpack.Encoder()
_GENERATION: Final = msgspec.msgpack.Decoder(Generation)
_CHANGE: Final = msgspec.msgpack.Decoder(GenerationChange)
_HOST_STATUS: Final = msgspec.msgpack.Decoder(HostStatus)
_LEADER_RECORD: Final = msgspec.msgpack.Decoder(LeaderRecord)
_JOB_RECORD: Final = msgspec.msgpack.Decoder(JobRecord)
_HOST_LOSSES: Final = msgspec.msgpack.Decoder(HostLosses)
_QUARANTINE_RECORD: Final = msgspec.msgpack.Decoder(QuarantineRecord)
_DEVICE_QUARANTINE_RECORD: Final = msgspec.msgpack.Decoder(DeviceQuarantineRecord)
_SCRIPT_RECORD: Final = msgspec.msgpack.Decoder(ScriptRecord)

RecordT = TypeVar("RecordT")


def decode_generation(stored: KeyValue) -> Generation:
    """Return the generation that a leader stored.

    Raises:
        JoinRefused: the value is no such record.
    """
    return _decode(_GENERATION, stored)


def decode_change(stored: KeyValue) -> GenerationChange:
    """Return what a leader has changed in the generation.

    Raises:
        JoinRefused: the value is no such record.
    """
    return _decode(_CHANGE, stored)


def decode_host_status(stored: KeyValue) -> HostStatus:
    """Return the status that an agent stored.

    Raises:
        JoinRefused: the value is no such record.
    """
    return _decode(_HOST_STATUS, stored)


def decode_leader_record(stored: KeyValue) -> LeaderRecord:
    """Return the record of the agent that leads.

    Raises:
        JoinRefused: the value is no such record.
    """
    return _decode(_LEADER_RECORD, stored)


def decode_job_record(stored: KeyValue) -> JobRecord:
    """Return the record that the first agent of a job stored.

    Raises:
        JoinRefused: the value is no such record.
    """
    return _decode(_JOB_RECORD, stored)


def decode_script_record(stored: KeyValue) -> ScriptRecord:
    """Return the record that the first host with a worker stored.

    Raises:
        JoinRefused: the value is no such record.
    """
    return _decode(_SCRIPT_RECORD, stored)


def decode_quarantine(stored: KeyValue) -> QuarantineRecord:
    """Return the record of a host in quarantine.

    Raises:
        JoinRefused: the value is no such record.
    """
    return _decode(_QUARANTINE_RECORD, stored)


def decode_device_quarantine(stored: KeyValue) -> DeviceQuarantineRecord:
    """Return the record of a device in quarantine.

    Raises:
        JoinRefused: the value is no such record.
    """
    return _decode(_DEVICE_QUARANTINE_RECORD, stored)


def decode_host_losses(stored: KeyValue) -> HostLosses:
    """Return the record of a host that was lost.

    Raises:
        JoinRefused: the value is no such record.
    """
    return _decode(_HOST_LOSSES, stored)


def _decode(decoder: msgspec.msgpack.Decoder[RecordT], stored: KeyValue) -> RecordT:
    try:
        return decode_message(decoder, stored.value, f"the record {stored.key} in the store")
    except MessageError as error:
        # Not a fault of the store, which agents wait out: the record stays as it is.
        raise JoinRefused(f"{error}, and give each job a name of its own") from error
