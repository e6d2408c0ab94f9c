"""Classes of messages of other programs, in the encoding of protocol buffers, from a schema that is a table.

protobuf makes the classes when the module with the table is loaded: no generated code, and so no version of it that
must fit the installed protobuf, nor a clash with another user of these messages in the process. The syntax is that of
proto2, whose fields have presence; the bytes are the same. A field that the table leaves out is kept as it is.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

AnyMessage: TypeAlias = Any
"""A message, or its class: made when a module is loaded, so no type checker knows its fields."""

_TYPES: Final = {
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "uint64": descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
    "enum": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,  # an enum's encoding
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
}


def make_message_classes(
    package: str, schema: Mapping[str, Mapping[str, tuple[int, str]]]
) -> dict[str, AnyMessage]:
    """Return the class of each message.

    Args:
        package: a name of our own; on the wire there are numbers only.
        schema: number and type of each field by message and name; the type `Message[]` is a list of messages.
    """
    pool = descriptor_pool.DescriptorPool()
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto2")
    for name, fields in schema.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number)
            is_list, base = kind.endswith("[]"), kind.removesuffix("[]")
            field.label = field.LABEL_REPEATED if is_list else field.LABEL_OPTIONAL
            if base in _TYPES:
                field.type = _TYPES[base]
            else:
                field.type = field.TYPE_MESSAGE
                field.type_name = f".{package}.{base}"
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in schema
    }
