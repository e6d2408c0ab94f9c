"""The messages of etcd's gRPC interface that a store needs, by field number.

A subset of https://github.com/etcd-io/etcd/blob/main/api/etcdserverpb/rpc.proto and mvccpb/kv.proto: fields that it
leaves out are neither sent nor read. As fields have presence, the members of a `oneof` are fields like others, and a
comparison with 0 is sent.
"""

from typing import Final

from resilient_jax.protocol.protobuf_classes import AnyMessage, make_message_classes

_SCHEMA: Final[dict[str, dict[str, tuple[int, str]]]] = {
    "Header": {"cluster_id": (1, "uint64"), "member_id": (2, "uint64"), "revision": (3, "int64")},
    "KeyValue": {
        "key": (1, "bytes"),
        "create_revision": (2, "int64"),
        "mod_revision": (3, "int64"),
        "version": (4, "int64"),
        "value": (5, "bytes"),
        "lease": (6, "int64"),
    },
    # Keys and values. All calls are transactions, also those of one operation.
    "Compare": {
        "result": (1, "enum"),
        "target": (2, "enum"),
        "key": (3, "bytes"),
        "version": (4, "int64"),
        "create_revision": (5, "int64"),
        "mod_revision": (6, "int64"),
        "value": (7, "bytes"),
    },
    "RangeRequest": {"key": (1, "bytes"), "range_end": (2, "bytes")},
    "RangeResponse": {"header": (1, "Header"), "kvs": (2, "KeyValue[]"), "count": (4, "int64")},
    "PutRequest": {
        "key": (1, "bytes"),
        "value": (2, "bytes"),
        "lease": (3, "int64"),
        "prev_kv": (4, "bool"),
    },
    "PutResponse": {"header": (1, "Header"), "prev_kv": (2, "KeyValue")},
    "DeleteRangeRequest": {"key": (1, "bytes"), "range_end": (2, "bytes")},
    "DeleteRangeResponse": {"header": (1, "Header"), "deleted": (2, "int64")},
    "RequestOp": {
        "request_range": (1, "RangeRequest"),
        "request_put": (2, "PutRequest"),
        "request_delete_range": (3, "DeleteRangeRequest"),
    },
    "ResponseOp": {
        "response_range": (1, "RangeResponse"),
        "response_put": (2, "PutResponse"),
        "response_delete_range": (3, "DeleteRangeResponse"),
    },
    "TxnRequest": {
        "compare": (1, "Compare[]"),
        "success": (2, "RequestOp[]"),
        "failure": (3, "RequestOp[]"),
    },
    "TxnResponse": {"header": (1, "Header"), "succeeded": (2, "bool"), "responses": (3, "ResponseOp[]")},
    "CompactionRequest": {"revision": (1, "int64")},
    "CompactionResponse": {"header": (1, "Header")},
    # Leases
    "LeaseGrantRequest": {"TTL": (1, "int64"), "ID": (2, "int64")},
    "LeaseGrantResponse": {
        "header": (1, "Header"),
        "ID": (2, "int64"),
        "TTL": (3, "int64"),
        "error": (4, "string"),
    },
    "LeaseRevokeRequest": {"ID": (1, "int64")},
    "LeaseRevokeResponse": {"header": (1, "Header")},
    "LeaseKeepAliveRequest": {"ID": (1, "int64")},
    "LeaseKeepAliveResponse": {"header": (1, "Header"), "ID": (2, "int64"), "TTL": (3, "int64")},
    # Watches
    "WatchCreateRequest": {
        "key": (1, "bytes"),
        "range_end": (2, "bytes"),
        "start_revision": (3, "int64"),
        "fragment": (8, "bool"),
    },
    "WatchProgressRequest": {},
    "WatchRequest": {
        "create_request": (1, "WatchCreateRequest"),
        "progress_request": (3, "WatchProgressRequest"),
    },
    "Event": {"type": (1, "enum"), "kv": (2, "KeyValue")},
    "WatchResponse": {
        "header": (1, "Header"),
        "watch_id": (2, "int64"),
        "created": (3, "bool"),
        "canceled": (4, "bool"),
        "compact_revision": (5, "int64"),
        "cancel_reason": (6, "string"),
        "fragment": (7, "bool"),
        "events": (11, "Event[]"),
    },
    # Users
    "AuthenticateRequest": {"name": (1, "string"), "password": (2, "string")},
    "AuthenticateResponse": {"header": (1, "Header"), "token": (2, "string")},
}

EVENT_DELETE: Final = 1
"""`Event.type` of a deleted key."""

_CLASSES: Final = make_message_classes("resilient_jax.etcd", _SCHEMA)


def get_message_class(name: str) -> AnyMessage:
    """Return the class of a message by its name in etcd's interface, such as `TxnRequest`."""
    return _CLASSES[name]
