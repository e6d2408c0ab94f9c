"""Prints a topology as tables."""

from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from resilient_jax.topology import Accelerator, LinkLevel, Port, Topology

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def print_topology(console: Console, topology: Topology) -> None:
    """Print tables of hosts, accelerators, links and failure domains, and the sources of their figures."""
    console.print(
        f"topology {escape(topology.name)}: {len(topology.hosts)} hosts, {topology.device_count} devices"
        + (f". {escape(topology.description)}" if topology.description else "")
    )
    console.print(_tabulate_hosts(topology))
    console.print(_tabulate_accelerators(topology))
    console.print(_tabulate_links(topology))
    console.print(_tabulate_domains(topology))
    for name, source in _sources(topology).items():
        console.print(f"source of {escape(name)}: {escape(source)}")


def format_si(number: float, unit: str) -> str:
    """Return a number with an SI prefix and at most four significant digits, such as "989.4 TFLOP/s"."""
    for factor, prefix in _PREFIXES:
        if number >= factor:
            return f"{number / factor:.4g} {prefix}{unit}"
    return f"{number:.4g} {unit}"


def _tabulate_hosts(topology: Topology) -> Table:
    table = Table("hosts", "devices each", "accelerator", "speed")
    for kind in topology.classes:
        table.add_row(
            str(kind.hosts), str(kind.devices), escape(kind.accelerator.name), f"{100 * kind.speed:.4g} %"
        )
    return table


def _tabulate_accelerators(topology: Topology) -> Table:
    table = Table("accelerator", "dense peak", "memory", "memory bandwidth")
    for accelerator in topology.accelerators:
        table.add_row(
            escape(accelerator.name),
            _describe_peaks(accelerator),
            format_si(accelerator.memory_bytes, "B"),
            format_si(accelerator.memory_bandwidth_bytes_per_s, "B/s"),
        )
    return table


def _describe_peaks(accelerator: Accelerator) -> str:
    return "\n".join(
        f"{peak.number_format} {format_si(peak.flops_per_s, 'FLOP/s')}" for peak in accelerator.peaks
    )


def _tabulate_links(topology: Topology) -> Table:
    table = Table("links within a", "bandwidth each way", "oversubscribed", "latency")
    for level in topology.levels:
        table.add_row(
            escape(level.name),
            _describe_port(level),
            f"{level.oversubscription:g} : 1",
            f"{level.latency_s * 1e6:g} µs",
        )
    return table


def _describe_port(level: LinkLevel) -> str:
    whose = "each device" if level.port is Port.DEVICE else "the devices of a host together"
    return f"{format_si(level.bandwidth_bytes_per_s, 'B/s')} {whose}"


def _tabulate_domains(topology: Topology) -> Table:
    table = Table("failure domain", "how many", "hosts in each")
    for level in topology.failure_levels:
        sizes = Counter(len(domain.hosts) for domain in topology.domains(level))
        each = ", ".join(
            f"{size}" if len(sizes) == 1 else f"{size} (in {count})" for size, count in sizes.items()
        )
        table.add_row(escape(level), str(sizes.total()), each)
    return table


def _sources(topology: Topology) -> dict[str, str]:
    known = {"hosts": "; ".join(dict.fromkeys(host.source for host in topology.hosts if host.source))}
    known |= {accelerator.name: accelerator.source for accelerator in topology.accelerators}
    known |= {f"links within a {level.name}": level.source for level in topology.levels}
    return {name: source for name, source in known.items() if source}
