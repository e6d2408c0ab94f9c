"""The messages of etcd's gRPC interface that a store needs, by field number.

The schema is a table here, from which protobuf makes the classes when this module is loaded: no generated code, and so
no version of it that must fit the installed protobuf, nor a clash with another etcd client in the process. It declares
a subset of https://github.com/etcd-io/etcd/blob/main/api/etcdserverpb/rpc.proto and mvccpb/kv.proto: fields that it
leaves out are neither sent nor read. The syntax is that of proto2, whose fields have presence, so that the members of a
`oneof` are fields like others, and a comparison with 0 is sent. The bytes are the same.
"""

from typing import Any, Final, TypeAlias

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

EtcdMessage: TypeAlias = Any
"""A message, or its class: made when this module is loaded, so no type checker knows its fields."""

_PACKAGE: Final = "resilient_jax.etcd"  # a name of our own: on the wire there are numbers only
_TYPES: Final = {
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "uint64": descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
    "enum": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,  # an enum's encoding
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
}

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

_POOL: Final = descriptor_pool.DescriptorPool()


def _add_schema() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="etcd.proto", package=_PACKAGE, syntax="proto2")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number)
            is_list, base = kind.endswith("[]"), kind.removesuffix("[]")
            field.label = field.LABEL_REPEATED if is_list else field.LABEL_OPTIONAL
            if base in _TYPES:
                field.type = _TYPES[base]
            else:
                field.type = field.TYPE_MESSAGE
                field.type_name = f".{_PACKAGE}.{base}"
    _POOL.Add(file)


_add_schema()


def get_message_class(name: str) -> EtcdMessage:
    """Return the class of a message by its name in etcd's interface, such as `TxnRequest`."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
