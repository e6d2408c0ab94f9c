"""A network of Linux namespaces, one for each host, with a link to a bridge of this machine."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator

from resilient_jax.cluster.launcher import HostSite

TBF = ("burst", "32kbit", "latency", "400ms")


class Network:
    """The namespaces of a job's hosts. After `build`, even a failed one, `remove` must be called.

    Attributes:
        gateway: the address of this machine, where the store listens.
    """

    def __init__(self, hosts: int) -> None:
        number = os.getpid() % 50_000
        self._bridge = f"rjb{number}"
        self._subnet = f"10.{200 + number // 250 % 50}.{number % 250}"
        self.gateway = f"{self._subnet}.1"
        self._names = {f"host-{index}": f"rj{number}-{index}" for index in range(hosts)}

    def sites(self) -> tuple[HostSite, ...]:
        """Return the address and the command prefix of each host, in order."""
        return tuple(
            HostSite(address=f"{self._subnet}.{index + 2}", command_prefix=("ip", "netns", "exec", name))
            for index, name in enumerate(self._names.values())
        )

    def cut_link(self, host: str) -> Callable[[], None]:
        """Take the host's link down, and return the function that brings the link up again."""
        run_command("ip", "link", "set", self._names[host], "down")
        return lambda: run_command("ip", "link", "set", self._names[host], "up")

    def throttle_link(self, host: str, mbit_s: float) -> Callable[[], None]:
        """Limit the host's link in both directions, and return the function that lifts the limit."""
        return self._queue(host, "tbf", "rate", f"{mbit_s}mbit", *TBF)

    def drop_packets(self, host: str, percent: float) -> Callable[[], None]:
        """Drop packets of the host's link in both directions, and return the function that ends the loss.

        Raises:
            OSError: the kernel has no netem.
        """
        return self._queue(host, "netem", "loss", f"{percent}%")

    def _queue(self, host: str, *words: str) -> Callable[[], None]:
        name = self._names[host]
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
        for site, name in zip(self.sites(), self._names.values(), strict=True):
            run_command("ip", "netns", "add", name)
            run_command("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            run_command("ip", "link", "set", name, "master", self._bridge, "up")
            run_command("ip", "-n", name, "address", "add", f"{site.address}/24", "dev", "eth0")
            run_command("ip", "-n", name, "link", "set", "eth0", "up")
            run_command("ip", "-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Remove what `build`, even an incomplete one, has created."""
        for words in (
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
def build_network(hosts: int) -> Iterator[Network]:
    """Build a network for the time of the `with` block.

    Raises:
        OSError: this process lacks the permission.
    """
    network = Network(hosts)
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
