"""The store's operations and events as etcd's messages, in a namespace of keys."""

from typing import Final

from resilient_jax.ids import LeaseId, Revision
from resilient_jax.protocol.protobuf_classes import AnyMessage
from resilient_jax.store.etcd_messages import EVENT_DELETE
from resilient_jax.store.interface import (
    Compare,
    CompareOperator,
    CompareTarget,
    DeleteEvent,
    DeleteOp,
    DeleteResponse,
    KeyValue,
    Operation,
    OperationResponse,
    PutEvent,
    PutOp,
    PutResponse,
    RangeOp,
    RangeResponse,
    WatchEvent,
)

_OPERATORS: Final = {
    CompareOperator.EQUAL: 0,
    CompareOperator.GREATER: 1,
    CompareOperator.LESS: 2,
    CompareOperator.NOT_EQUAL: 3,
}
_TARGETS: Final = {
    CompareTarget.VERSION: 0,
    CompareTarget.CREATE_REVISION: 1,
    CompareTarget.MOD_REVISION: 2,
    CompareTarget.VALUE: 3,
}


class EtcdEncoding:
    """Encodes keys with a namespace in front of them, and decodes them without."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace.encode()

    def _make_key(self, key: str) -> bytes:
        return self._namespace + key.encode()

    def make_range(self, key: str, *, is_prefix: bool) -> dict[str, bytes]:
        """Return the fields of a range. For one key it has no end: an empty one is sent, and means no limit."""
        first = self._make_key(key)
        if not is_prefix:
            return {"key": first}
        if not first:
            return {"key": b"\0", "range_end": b"\0"}  # all keys
        # UTF-8 has no byte 0xff, so the last one can grow.
        return {"key": first, "range_end": first[:-1] + bytes([first[-1] + 1])}

    def encode_compare(self, compare: Compare) -> dict[str, object]:
        """Return the fields of a comparison."""
        return {
            "key": self._make_key(compare.key),
            "target": _TARGETS[compare.target],
            "result": _OPERATORS[compare.op],
            compare.target.value: compare.value,
        }

    def encode_operation(self, operation: Operation) -> dict[str, object]:
        """Return the fields of an operation of a transaction."""
        match operation:
            case PutOp(key=key, value=value, lease=lease):
                fields = {"key": self._make_key(key), "value": value, "lease": lease, "prev_kv": True}
                return {"request_put": fields}
            case DeleteOp(key=key, is_prefix=is_prefix):
                return {"request_delete_range": self.make_range(key, is_prefix=is_prefix)}
            case RangeOp(key=key, is_prefix=is_prefix):
                return {"request_range": self.make_range(key, is_prefix=is_prefix)}

    def decode_response(
        self, operation: Operation, response: AnyMessage, revision: Revision
    ) -> OperationResponse:
        """Return the response to an operation, in a transaction of this revision."""
        match operation:
            case PutOp():
                before = response.response_put.prev_kv
                written = KeyValue(
                    key=operation.key,
                    value=operation.value,
                    create_revision=Revision(before.create_revision or revision),
                    mod_revision=revision,
                    version=before.version + 1,
                    lease=operation.lease,
                )
                return PutResponse(key_value=written)
            case DeleteOp():
                return DeleteResponse(deleted=response.response_delete_range.deleted)
            case RangeOp():
                found = tuple(map(self._decode_key_value, response.response_range.kvs))
                return RangeResponse(key_values=found)

    def _decode_key_value(self, found: AnyMessage) -> KeyValue:
        return KeyValue(
            key=self._decode_key(found.key),
            value=found.value,
            create_revision=Revision(found.create_revision),
            mod_revision=Revision(found.mod_revision),
            version=found.version,
            lease=LeaseId(found.lease),
        )

    def decode_event(self, event: AnyMessage) -> WatchEvent:
        """Return the event of a watch."""
        if event.type == EVENT_DELETE:
            key, revision = self._decode_key(event.kv.key), Revision(event.kv.mod_revision)
            return DeleteEvent(key=key, mod_revision=revision)
        return PutEvent(key_value=self._decode_key_value(event.kv))

    def _decode_key(self, key: bytes) -> str:
        return key[len(self._namespace) :].decode()
