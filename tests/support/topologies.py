"""A small topology as text and as a value, and the folder of the real ones."""

from resilient_jax.ids import HostName
from resilient_jax.topology import (
    Accelerator,
    Host,
    LinkLevel,
    NumberFormat,
    Peak,
    Port,
    Topology,
)

TEXT = """
name = "small"

[[accelerators]]
name = "chip"
peak_flops_per_s.bf16 = 1e14
memory_bytes = 16e9
memory_bandwidth_bytes_per_s = 1e12
source = "made up"

[[hosts]]
names = "host-{0..7}"
accelerator = "chip"
devices_per_host = 4
source = "made up"

[[links]]
level = "host"
device_bandwidth_bytes_per_s = 1e11
latency_s = 1e-6
source = "made up"

[[links]]
level = "rack"
hosts_per_domain = 2
host_bandwidth_bytes_per_s = 1e10
latency_s = 1e-5
source = "made up"

[[links]]
level = "pod"
hosts_per_domain = 4
host_bandwidth_bytes_per_s = 1e10
latency_s = 1e-5
source = "made up"

[[links]]
level = "cluster"
host_bandwidth_bytes_per_s = 1e10
oversubscription = 4
latency_s = 2e-5
source = "made up"
"""

CHIP = Accelerator(
    name="chip",
    peaks=(Peak(number_format=NumberFormat.BF16, flops_per_s=1e14),),
    memory_bytes=16 * 10**9,
    memory_bandwidth_bytes_per_s=1e12,
)

LEVELS = (
    LinkLevel(name="host", bandwidth_bytes_per_s=1e11, port=Port.DEVICE, latency_s=1e-6),
    LinkLevel(name="rack", bandwidth_bytes_per_s=1e10, port=Port.HOST, latency_s=1e-5),
    LinkLevel(name="pod", bandwidth_bytes_per_s=1e10, port=Port.HOST, latency_s=1e-5),
    LinkLevel(
        name="cluster", bandwidth_bytes_per_s=1e10, port=Port.HOST, latency_s=2e-5, oversubscription=4.0
    ),
)


def host(index: int) -> Host:
    """Return host `index` of `SMALL`, or of an extension of it: racks of two hosts, pods of four."""
    return Host(
        name=HostName(f"host-{index}"),
        accelerator=CHIP,
        devices=4,
        domains=(f"rack-{index // 2}", f"pod-{index // 4}"),
    )


SMALL = Topology(name="small", levels=LEVELS, hosts=tuple(map(host, range(8))))
"""The value of `TEXT`."""
