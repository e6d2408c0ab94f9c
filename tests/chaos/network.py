"""A network of Linux namespaces, one for each machine, with a link to a bridge of this one."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence

from resilient_jax.cluster.launcher import HostSite

TBF = ("burst", "32kbit", "latency", "400ms")


class Network:
    """The namespaces of a job's hosts, and of the members of its store.

    After `build`, even a failed one, `remove` must be called.

    Attributes:
        gateway: the address of this machine, where the store listens.
    """

    def __init__(self, hosts: int, store_members: Sequence[str] = ()) -> None:
        """Prepare namespaces for so many hosts, and for these members of the store."""
        number = os.getpid() % 50_000
        self._bridge = f"rjb{number}"
        self._subnet = f"10.{200 + number // 250 % 50}.{number % 250}"
        self.gateway = f"{self._subnet}.1"
        self._num_hosts = hosts
        machines = [*(f"host-{index}" for index in range(hosts)), *store_members]
        self._names = {machine: f"rj{number}-{index}" for index, machine in enumerate(machines)}

    def sites(self) -> tuple[HostSite, ...]:
        """Return the address and the command prefix of each host, in order."""
        return self._sites()[: self._num_hosts]

    def store_sites(self) -> tuple[HostSite, ...]:
        """Return the address and the command prefix of each member of the store, in order."""
        return self._sites()[self._num_hosts :]

    def _sites(self) -> tuple[HostSite, ...]:
        return tuple(
            HostSite(address=f"{self._subnet}.{index + 2}", command_prefix=("ip", "netns", "exec", name))
            for index, name in enumerate(self._names.values())
        )

    def cut_link(self, machine: str) -> Callable[[], None]:
        """Take a machine's link down, and return the function that brings the link up again."""
        run_command("ip", "link", "set", self._names[machine], "down")
        return lambda: run_command("ip", "link", "set", self._names[machine], "up")

    def cut_pair(self, first: str, second: str) -> Callable[[], None]:
        """Drop what two machines send each other, and return the function that ends it."""
        sites = dict(zip(self._names, self._sites(), strict=True))
        routes = [
            (self._names[here], f"{sites[there].address}/32")
            for here, there in ((first, second), (second, first))
        ]
        for name, address in routes:
            run_command("ip", "-n", name, "route", "add", "blackhole", address)

        def undo() -> None:
            for name, address in routes:
                run_command("ip", "-n", name, "route", "delete", "blackhole", address)

        return undo

    def throttle_link(self, machine: str, mbit_s: float) -> Callable[[], None]:
        """Limit a machine's link in both directions, and return the function that lifts the limit."""
        return self._queue(machine, "tbf", "rate", f"{mbit_s}mbit", *TBF)

    def drop_packets(self, machine: str, percent: float) -> Callable[[], None]:
        """Drop packets of a machine's link in both directions, and return the function that ends the loss.

        Raises:
            OSError: the kernel has no netem.
        """
        return self._queue(machine, "netem", "loss", f"{percent}%")

    def _queue(self, machine: str, *words: str) -> Callable[[], None]:
        name = self._names[machine]
        ends = (("tc", "-n", name), "eth0"), (("tc",), name)
        done: list[tuple[tuple[str, ...], str]] = []

        def undo() -> None:
            for command, device in done:
                with contextlib.suppress(OSError):
                    run_command(*command, "qdisc", "delete", "dev", device, "root")

        try:
            for command, device in ends:
                run_command(*command, "qdisc", "replace", "dev", device, "root", *words)
                done.append((command, device))
        except OSError:
            undo()
            raise
        return undo

    def build(self) -> None:
        """Create the namespaces, the links and the bridge.

        Raises:
            OSError: this process lacks the permission.
        """
        run_command("ip", "link", "add", self._bridge, "type", "bridge")
        run_command("ip", "address", "add", f"{self.gateway}/24", "dev", self._bridge)
        run_command("ip", "link", "set", self._bridge, "up")
        for site, name in zip(self._sites(), self._names.values(), strict=True):
            run_command("ip", "netns", "add", name)
            run_command("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            run_command("ip", "link", "set", name, "master", self._bridge, "up")
            run_command("ip", "-n", name, "address", "add", f"{site.address}/24", "dev", "eth0")
            run_command("ip", "-n", name, "link", "set", "eth0", "up")
            run_command("ip", "-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Remove what `build`, even an incomplete one, has created."""
        for words in (
            # First: with its namespace a link goes only some time later, and the next network may want its name.
            *(("link", "delete", name) for name in self._names.values()),
            *(("netns", "delete", name) for name in self._names.values()),
            ("link", "delete", self._bridge),
        ):
            with contextlib.suppress(OSError):
                run_command("ip", *words)

    def list_namespaces(self) -> list[str]:
        """Return the namespaces that still exist."""
        found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
        return sorted(set(self._names.values()) & {line.split()[0] for line in found.splitlines() if line})


@contextlib.contextmanager
def build_network(hosts: int, store_members: Sequence[str] = ()) -> Iterator[Network]:
    """Build a network for the time of the `with` block.

    Raises:
        OSError: this process lacks the permission.
    """
    network = Network(hosts, store_members)
    try:
        network.build()
        yield network
    finally:
        network.remove()


def run_command(*words: str) -> None:
    """Run a system command to its end.

    Raises:
        OSError: the command failed; with its error output.
    """
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
    if done.returncode:
        raise OSError(f"`{' '.join(words)}`: {done.stderr.strip()}")
