"""Data that moves between phases and clusters: DataProto, its wire format, and metrics."""

from roll.protocol.data_proto import DataProto, DataProtoItem

__all__ = ["DataProto", "DataProtoItem"]
