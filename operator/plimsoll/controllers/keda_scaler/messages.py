"""The messages of KEDA's gRPC service `externalscaler.ExternalScaler`.

Problem: generated code needs protoc at build time and ties the operator to one version of its runtime.

Idea: the descriptors are built here from field numbers and types, which are the wire format. A field that KEDA adds is
an unknown field, which protobuf ignores. StreamMetricSpec is left out: KEDA goes on without it when it is
unimplemented.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE: Final = "externalscaler"
SERVICE: Final = "externalscaler.ExternalScaler"

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "string": _Field.TYPE_STRING,
    "bool": _Field.TYPE_BOOL,
    "int64": _Field.TYPE_INT64,
    "double": _Field.TYPE_DOUBLE,
}
# By message: name, type and whether it is repeated; the position is the number. A dot leads to another message.
_MESSAGES: Final[dict[str, tuple[tuple[str, str, bool], ...]]] = {
    "ScaledObjectRef": (
        ("name", "string", False),
        ("namespace", "string", False),
        ("scalerMetadata", ".ScaledObjectRef.ScalerMetadataEntry", True),
    ),
    "IsActiveResponse": (("result", "bool", False),),
    "GetMetricSpecResponse": (("metricSpecs", ".MetricSpec", True),),
    "MetricSpec": (
        ("metricName", "string", False),
        ("targetSize", "int64", False),
        ("targetSizeFloat", "double", False),
    ),
    "GetMetricsRequest": (("scaledObjectRef", ".ScaledObjectRef", False), ("metricName", "string", False)),
    "GetMetricsResponse": (("metricValues", ".MetricValue", True),),
    "MetricValue": (
        ("metricName", "string", False),
        ("metricValue", "int64", False),
        ("metricValueFloat", "double", False),
    ),
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="plimsoll/externalscaler.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for number, (field, kind, is_repeated) in enumerate(fields, start=1):
            _add_field(message, field, number, kind, is_repeated)
    entry = file.message_type[0].nested_type.add(name="ScalerMetadataEntry")
    entry.options.map_entry = True
    for number, field in enumerate(("key", "value"), start=1):
        _add_field(entry, field, number, "string", False)
    return file


def _add_field(message: Any, name: str, number: int, kind: str, is_repeated: bool) -> None:
    label = _Field.LABEL_REPEATED if is_repeated else _Field.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, label=label)
    if kind.startswith("."):
        field.type, field.type_name = _Field.TYPE_MESSAGE, f".{PACKAGE}{kind}"
    else:
        field.type = _SCALARS[kind]


_pool: Final = descriptor_pool.DescriptorPool()
_pool.Add(_file())


def _message_class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ScaledObjectRef: Final = _message_class("ScaledObjectRef")
IsActiveResponse: Final = _message_class("IsActiveResponse")
GetMetricSpecResponse: Final = _message_class("GetMetricSpecResponse")
MetricSpec: Final = _message_class("MetricSpec")
GetMetricsRequest: Final = _message_class("GetMetricsRequest")
GetMetricsResponse: Final = _message_class("GetMetricsResponse")
MetricValue: Final = _message_class("MetricValue")
