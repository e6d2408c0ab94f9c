"""A cluster as a value: hosts, devices, links, failure domains; loaded from `meshes/*.toml`."""

from resilient_jax.ids import HostName
from resilient_jax.topology.accelerator import Accelerator, NumberFormat, Peak
from resilient_jax.topology.domains import DomainHosts, FailureDomain
from resilient_jax.topology.errors import TopologyError, UnknownHost
from resilient_jax.topology.file_loader import decode_topology, load_topology
from resilient_jax.topology.hosts import Host, HostClass
from resilient_jax.topology.links import HOST_LEVEL, LinkLevel, Port
from resilient_jax.topology.topology import Topology

__all__ = [
    "HOST_LEVEL",
    "Accelerator",
    "DomainHosts",
    "FailureDomain",
    "Host",
    "HostClass",
    "HostName",
    "LinkLevel",
    "NumberFormat",
    "Peak",
    "Port",
    "Topology",
    "TopologyError",
    "UnknownHost",
    "decode_topology",
    "load_topology",
]
