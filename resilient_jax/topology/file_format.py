"""The tables of a topology file; `meshes/README.md` defines each key.

Ranges are wide: a value outside of them is mostly a number in another unit.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

Name = Annotated[str, Meta(min_length=1, max_length=255)]
Source = Annotated[str, Meta(min_length=1)]
Flops = Annotated[float, Meta(ge=1e6, le=1e18)]
Bytes = Annotated[float, Meta(ge=1e6, le=1e15)]
Bandwidth = Annotated[float, Meta(ge=1e3, le=1e16)]
Latency = Annotated[float, Meta(ge=0, le=1)]


class TopologyTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all tables: an unknown key is refused."""


class PeaksTable(TopologyTable, frozen=True, kw_only=True):
    """`peak_flops_per_s`: one key per number format, see `NumberFormat`."""

    fp64: Flops | None = None
    fp32: Flops | None = None
    tf32: Flops | None = None
    bf16: Flops | None = None
    fp16: Flops | None = None
    fp8: Flops | None = None
    int8: Flops | None = None


class AcceleratorTable(TopologyTable, frozen=True, kw_only=True):
    """`[[accelerators]]`: one kind of accelerator."""

    name: Name
    peak_flops_per_s: PeaksTable
    memory_bytes: Bytes
    memory_bandwidth_bytes_per_s: Bandwidth
    source: Source


class HostsTable(TopologyTable, frozen=True, kw_only=True):
    """`[[hosts]]`: hosts that are alike."""

    names: Name | Annotated[tuple[Name, ...], Meta(min_length=1)]
    accelerator: Name
    devices_per_host: Annotated[int, Meta(ge=1, le=1024)]
    source: Source
    domains: dict[str, Name] = {}
    speed: Annotated[float, Meta(gt=0, le=1)] = 1.0


class LinksTable(TopologyTable, frozen=True, kw_only=True):
    """`[[links]]`: one level; exactly one of the two bandwidths."""

    level: Name
    latency_s: Latency
    source: Source
    device_bandwidth_bytes_per_s: Bandwidth | None = None
    host_bandwidth_bytes_per_s: Bandwidth | None = None
    oversubscription: Annotated[float, Meta(ge=1, le=1000)] = 1.0
    hosts_per_domain: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class TopologyFile(TopologyTable, frozen=True, kw_only=True):
    """A complete file. Missing lists of tables are refused by `build_topology`, with better messages than here."""

    name: Name
    description: str = ""
    accelerators: tuple[AcceleratorTable, ...] = ()
    hosts: tuple[HostsTable, ...] = ()
    links: tuple[LinksTable, ...] = ()


TABLES: dict[str, type[TopologyTable]] = {
    "": TopologyFile,
    "accelerators": AcceleratorTable,
    "accelerators.peak_flops_per_s": PeaksTable,
    "hosts": HostsTable,
    "links": LinksTable,
}
"""Tables by their path, without indices."""
