"""An etcd cluster on this machine, which belongs to one campaign or test and may be broken.

A cluster that others use is never broken: a campaign whose job has its store there leaves its members alone.
"""

import concurrent.futures
import contextlib
import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from resilient_jax.cluster.child_process import bind_to_this_process
from resilient_jax.cluster.launcher import HostSite
from resilient_jax.errors import CallerError, InternalError
from resilient_jax.store.etcd_address import EtcdAddress
from resilient_jax.transport.credentials import TlsFiles
from tests.chaos.manifest import STORE_MEMBERS

FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Below the ports that the kernel gives to outgoing connections."""
START_TIMEOUT_S = 30.0
LOOPBACK_SITES = (HostSite(address="127.0.0.1"),) * len(STORE_MEMBERS)
ELECTION = ("--heartbeat-interval=50", "--election-timeout=500")
LOG_TAIL_CHARS = 2000


class EtcdCluster:
    """The members, with their data in folders of `directory`. Enter it to start them; all are killed on leaving.

    Its methods may be called on any thread.
    """

    def __init__(
        self,
        directory: Path,
        *,
        sites: Sequence[HostSite] = LOOPBACK_SITES,
        options: Sequence[str] = ELECTION,
        tls: TlsFiles | None = None,
    ) -> None:
        """Prepare the cluster.

        Args:
            directory: an existing folder, for the members' data and logs.
            sites: where each member runs, of three at most.
            options: of every member's command line.
            tls: certificates with which the members serve clients, and expect them to have one.

        Raises:
            CallerError: etcd is not installed.
        """
        program = shutil.which("etcd")
        if program is None:
            raise CallerError(
                "found no etcd in PATH, expected one of 3.4 or later for a cluster of the campaign's own. Install it "
                "(Debian: apt-get install etcd-server)"
            )
        self._program = program
        self._directory = directory
        self._sites = tuple(sites)
        ports = _find_free_ports(2 * len(sites))
        self._client_ports, self._peer_ports = ports[: len(sites)], ports[len(sites) :]
        self._options = options
        self._tls = tls
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * len(sites)
        self._starter = concurrent.futures.ThreadPoolExecutor(1, "etcd-starter")
        """Starts all members: the kernel ends them with the thread that started them."""

    @property
    def address(self) -> EtcdAddress:
        """The address of the cluster, without a namespace."""
        sites = zip(self._sites, self._client_ports, strict=True)
        return EtcdAddress(tuple(f"{site.address}:{port}" for site, port in sites))

    def __enter__(self) -> "EtcdCluster":
        try:
            for member in range(len(self._sites)):
                self.start(member)
            self.find_leader()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in range(len(self._sites)):
            self.kill(member)
        self._starter.shutdown()

    def start(self, member: int) -> None:
        """Start a member, with the data that it had, unless it runs."""
        self._starter.submit(self._start, member).result()

    def _start(self, member: int) -> None:
        process = self._processes[member]
        if process is not None and process.poll() is None:
            return
        client, peer = self._make_url(member), self._make_peer_url(member)
        names = STORE_MEMBERS[: len(self._sites)]
        peers = ",".join(f"{name}={self._make_peer_url(number)}" for number, name in enumerate(names))
        name = names[member]
        command = [
            *self._sites[member].command_prefix,
            *(self._program, f"--name={name}", f"--data-dir={self._directory / name}", *self._options),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            *(f"--initial-cluster={peers}", f"--initial-cluster-token={self._directory.name}"),
        ]
        if self._tls is not None:
            command += [f"--cert-file={self._tls.certificate}", f"--key-file={self._tls.key}"]
            command += [f"--trusted-ca-file={self._tls.authority}", "--client-cert-auth"]
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(
                bind_to_this_process(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def find_pid(self, member: int) -> int | None:
        """Return the process of a member; None if it does not run."""
        process = self._processes[member]
        return process.pid if process is not None and process.poll() is None else None

    def signal(self, member: int, number: signal.Signals) -> None:
        """Send a running member a signal."""
        process = self._processes[member]
        assert process is not None, f"member {member} does not run"
        process.send_signal(number)

    def kill(self, member: int) -> None:
        """Kill a member, if it runs."""
        process, self._processes[member] = self._processes[member], None
        if process is not None:
            process.kill()
            process.wait()

    def restore(self) -> None:
        """Continue all members that were stopped, start all that were killed, and wait for a leader."""
        for member in range(len(self._sites)):
            self.start(member)
            self.signal(member, signal.SIGCONT)
        self.find_leader()

    def find_leader(self) -> int:
        """Return the member that leads.

        Raises:
            InternalError: none does within `START_TIMEOUT_S`, with the end of the members' logs.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(StopIteration):
                return next(
                    member
                    for member, status in self._read_statuses()
                    if status.get("leader") and status["leader"] == status["header"]["member_id"]
                )
            time.sleep(0.05)
        logs = [path.read_text()[-LOG_TAIL_CHARS:] for path in sorted(self._directory.glob("*.log"))]
        raise InternalError("\n".join([f"no member of etcd leads after {START_TIMEOUT_S:g} s:", *logs]))

    def request(self, member: int, path: str, body: Mapping[str, str] | None = None) -> dict:
        """Return the answer of a member to a request to its JSON interface.

        Raises:
            OSError: the member does not answer, or refuses.
        """
        context = None
        if self._tls is not None:
            context = ssl.create_default_context(cafile=self._tls.authority)
            context.load_cert_chain(self._tls.certificate, self._tls.key)
        url, data = f"{self._make_url(member)}/v3/{path}", json.dumps(body or {}).encode()
        with urllib.request.urlopen(url, data=data, timeout=1.0, context=context) as response:
            return json.load(response)

    def _make_url(self, member: int) -> str:
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{self._sites[member].address}:{self._client_ports[member]}"

    def _make_peer_url(self, member: int) -> str:
        return f"http://{self._sites[member].address}:{self._peer_ports[member]}"

    def _read_statuses(self) -> Iterator[tuple[int, dict]]:
        for member in range(len(self._sites)):
            try:
                status = self.request(member, "maintenance/status")
            except OSError:
                continue
            yield member, status


def _find_free_ports(count: int) -> list[int]:
    """Return free ports; each is bound for a moment, so that two callers at a time rarely get the same."""
    with contextlib.ExitStack() as held:
        found: list[int] = []
        for port in range(FIRST_PORT + (time.time_ns() // 1000) % 8000, LAST_PORT):
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise InternalError(f"found {len(found)} free ports from {FIRST_PORT} to {LAST_PORT}, expected {count}")
