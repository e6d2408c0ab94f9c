"""Checks of what a job needs of the network: ports, loopback, and a host name that leads here."""

import ipaddress
import socket
from pathlib import Path
from typing import Final

import psutil

from resilient_jax.doctor.check_result import CheckResult, CheckVerdict, judge

GROUP: Final = "network"
LOOPBACK: Final = "127.0.0.1"
TIMEOUT_S: Final = 5.0
PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
MIN_PORTS: Final = 2000


def check_network(host: str) -> list[CheckResult]:
    """Return a result for each thing that a job needs.

    Args:
        host: name of this machine. Agents use addresses, but libraries resolve the name.
    """
    return [
        check_loopback(),
        judge_ports(PORT_RANGE.read_text() if PORT_RANGE.exists() else ""),
        check_interfaces(),
        check_host_name(host),
    ]


def check_loopback() -> CheckResult:
    """Listen on loopback, connect, and send a byte."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            server.settimeout(TIMEOUT_S)
            with socket.create_connection(server.getsockname(), timeout=TIMEOUT_S) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"x")
                    accepted.settimeout(TIMEOUT_S)
                    is_working = accepted.recv(1) == b"x"
    except OSError as error:
        return CheckResult(
            group=GROUP,
            name="loopback",
            verdict=CheckVerdict.PROBLEM,
            found=f"{LOOPBACK}: {error}",
            remedy="ip link set lo up; allow connections on loopback in the firewall",
        )
    verdict = CheckVerdict.OK if is_working else CheckVerdict.PROBLEM
    return CheckResult(
        group=GROUP, name="loopback", verdict=verdict, found=f"a port of {LOOPBACK} can be bound and reached"
    )


def judge_ports(text: str) -> CheckResult:
    """Judge the range of ports for connections, as /proc/sys/net/ipv4/ip_local_port_range has it."""
    words = text.split()
    if len(words) != 2:
        return CheckResult(
            group=GROUP, name="ports", verdict=CheckVerdict.NOT_RUN, found=f"{PORT_RANGE}: none"
        )
    count = int(words[1]) - int(words[0]) + 1
    is_low = count < MIN_PORTS
    return judge(
        GROUP,
        "ports",
        f"{words[0]} to {words[1]}: {count}",
        is_bad=is_low,
        remedy="sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
    )


def check_interfaces() -> CheckResult:
    """List the interfaces that are up, with their IPv4 addresses."""
    stats = psutil.net_if_stats()
    found = [
        f"{name} {address.address}"
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for address in addresses
        if address.family is socket.AF_INET and name in stats and stats[name].isup
    ]
    others = [entry for entry in found if not ipaddress.ip_address(entry.split()[-1]).is_loopback]
    return judge(
        GROUP,
        "interfaces",
        ", ".join(found) or "none is up",
        is_bad=not others,
        remedy="other hosts cannot reach this one; `launch`, on one machine, works",
    )


def check_host_name(host: str) -> CheckResult:
    """Resolve the host's name, and bind what it resolves to."""
    try:
        address = socket.gethostbyname(host)
        with socket.create_server((address, 0)):
            pass
        found, is_bad = f"{host} is {address}", False
    except OSError as error:
        found, is_bad = f"{host}: {error}", True
    remedy = "add it to /etc/hosts with an address of this machine"
    return judge(GROUP, "host name", found, is_bad=is_bad, remedy=remedy)
