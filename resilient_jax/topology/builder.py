"""From the tables of a file to a `Topology`: checks of several values together, such as names that refer to nothing."""

from collections.abc import Iterator, Sequence

from resilient_jax.errors import ConfigError
from resilient_jax.ids import HostName
from resilient_jax.topology.accelerator import Accelerator, NumberFormat, Peak
from resilient_jax.topology.errors import TopologyError
from resilient_jax.topology.file_format import (
    AcceleratorTable,
    HostsTable,
    LinksTable,
    PeaksTable,
    TopologyFile,
)
from resilient_jax.topology.host_names import expand_pattern
from resilient_jax.topology.hosts import Host
from resilient_jax.topology.links import HOST_LEVEL, LinkLevel, Port
from resilient_jax.topology.toml_decoder import suggest_name
from resilient_jax.topology.topology import Topology


def build_topology(file: TopologyFile, *, source: str) -> Topology:
    """Return the topology that a file describes.

    Args:
        source: name of the file in messages.

    Raises:
        ConfigError: tables are missing or contradict each other; names the key.
    """
    try:
        levels = tuple(_build_levels(file.links))
        accelerators = _build_accelerators(file.accelerators)
        hosts = tuple(_build_hosts(file, accelerators))
        return Topology(name=file.name, description=file.description, levels=levels, hosts=hosts)
    except TopologyError as error:
        end = "" if str(error).endswith("?") else "."
        raise ConfigError(f"{source}: key '{error.key}': {error}{end}") from error


def _build_levels(tables: Sequence[LinksTable]) -> Iterator[LinkLevel]:
    if not tables:
        raise TopologyError(
            f"found no links, expected [[links]] tables from inside outward, the first with level = {HOST_LEVEL!r}. "
            "Say how fast devices and hosts are connected",
            key="links",
        )
    if tables[0].level != HOST_LEVEL:
        raise TopologyError(
            f"found {tables[0].level!r} as the first level, expected {HOST_LEVEL!r}. List levels from inside outward, "
            "starting with the links between the devices of a host",
            key="links[0].level",
        )
    _check_domain_sizes(tables)
    seen: set[str] = set()
    for index, table in enumerate(tables):
        if table.level in seen:
            raise TopologyError(
                f"found the level {table.level!r} a second time, expected every level once. Rename it",
                key=f"links[{index}].level",
            )
        seen.add(table.level)
        yield _build_level(table, f"links[{index}]")


def _build_level(table: LinksTable, key: str) -> LinkLevel:
    of_device, of_host = table.device_bandwidth_bytes_per_s, table.host_bandwidth_bytes_per_s
    if (of_device is None) == (of_host is None):
        raise TopologyError(
            f"found {'both' if of_host else 'neither'} of device_bandwidth_bytes_per_s and "
            "host_bandwidth_bytes_per_s, expected one of them. Give the device's if each device has a port of its own, "
            "the host's if its devices share it",
            key=key,
        )
    return LinkLevel(
        name=table.level,
        bandwidth_bytes_per_s=of_device or of_host or 0.0,
        port=Port.DEVICE if of_device else Port.HOST,
        latency_s=table.latency_s,
        oversubscription=table.oversubscription,
        source=table.source,
    )


def _check_domain_sizes(tables: Sequence[LinksTable]) -> None:
    for index in {0, len(tables) - 1}:
        if tables[index].hosts_per_domain is not None:
            what = "a host is its own domain" if index == 0 else "the last level has all hosts"
            raise TopologyError(
                f"found {tables[index].hosts_per_domain}, expected none: {what}. Remove it, or add the level that is "
                "missing",
                key=f"links[{index}].hosts_per_domain",
            )
    # Domains nest if each size is a multiple of the next smaller one.
    inner = 1
    for index, table in enumerate(tables):
        if (size := table.hosts_per_domain) is None:
            continue
        if size % inner:
            raise TopologyError(
                f"found {size}, expected a multiple of the {inner} hosts of the domains inside. Change one of them, "
                "or name each host's domains in [[hosts]]",
                key=f"links[{index}].hosts_per_domain",
            )
        inner = size


def _build_accelerators(tables: Sequence[AcceleratorTable]) -> dict[str, Accelerator]:
    accelerators: dict[str, Accelerator] = {}
    for index, table in enumerate(tables):
        if table.name in accelerators:
            raise TopologyError(
                f"found {table.name!r} a second time, expected every name once. Rename it",
                key=f"accelerators[{index}].name",
            )
        if not (peaks := tuple(_build_peaks(table.peak_flops_per_s))):
            raise TopologyError(
                f"found no number format, expected at least one of {', '.join(NumberFormat)}. Add one, such as "
                "peak_flops_per_s.bf16 = 1e14",
                key=f"accelerators[{index}].peak_flops_per_s",
            )
        accelerators[table.name] = Accelerator(
            name=table.name,
            peaks=peaks,
            memory_bytes=int(table.memory_bytes),
            memory_bandwidth_bytes_per_s=table.memory_bandwidth_bytes_per_s,
            source=table.source,
        )
    return accelerators


def _build_peaks(table: PeaksTable) -> Iterator[Peak]:
    for number_format in NumberFormat:
        if (flops := getattr(table, number_format)) is not None:
            yield Peak(number_format=number_format, flops_per_s=flops)


def _build_hosts(file: TopologyFile, accelerators: dict[str, Accelerator]) -> Iterator[Host]:
    between = file.links[1:-1]
    # Index of the host in the file, which determines its domain where domains are counted off.
    place = 0
    for index, table in enumerate(file.hosts):
        key = f"hosts[{index}]"
        _check_hosts_table(table, key, accelerators, between)
        for name in _expand(table.names, key):
            yield Host(
                name=HostName(name),
                accelerator=accelerators[table.accelerator],
                devices=table.devices_per_host,
                speed=table.speed,
                domains=tuple(_domain(level, table, place) for level in between),
                source=table.source,
            )
            place += 1
    if not file.hosts:
        raise TopologyError(
            "found no hosts, expected [[hosts]] tables. Add one with names, accelerator and devices_per_host",
            key="hosts",
        )


def _check_hosts_table(
    table: HostsTable, key: str, accelerators: dict[str, Accelerator], between: Sequence[LinksTable]
) -> None:
    if table.accelerator not in accelerators:
        raise TopologyError(
            f"found the unknown accelerator {table.accelerator!r}, expected one of {list(accelerators)}, the names of "
            f"[[accelerators]]. {suggest_name(table.accelerator, list(accelerators)).rstrip('.')}",
            key=f"{key}.accelerator",
        )
    named = [level.level for level in between if level.hosts_per_domain is None]
    for level in table.domains:
        if level not in named:
            raise TopologyError(
                f"found a domain of the level {level!r}, expected one of {named}: the levels between the first and the "
                "last that have no hosts_per_domain. Remove it, or that level's hosts_per_domain",
                key=f"{key}.domains.{level}",
            )
    for level in named:
        if level not in table.domains:
            raise TopologyError(
                f"found nothing, expected the name of these hosts' {level}. Add it, or give the level {level!r} "
                "hosts_per_domain to have the hosts counted off",
                key=f"{key}.domains.{level}",
            )


def _expand(names: str | tuple[str, ...], key: str) -> Iterator[str]:
    try:
        if isinstance(names, str):
            yield from expand_pattern(names)
        else:
            for pattern in names:
                yield from expand_pattern(pattern)
    except TopologyError as error:
        raise TopologyError(str(error), key=f"{key}.names") from error


def _domain(level: LinksTable, table: HostsTable, place: int) -> str:
    if level.hosts_per_domain is None:
        return table.domains[level.level]
    # Hosts are counted off in the order of the file: domain = floor(index / hosts per domain).
    return f"{level.level}-{place // level.hosts_per_domain}"
