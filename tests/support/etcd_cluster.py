"""A real etcd cluster of three members on this machine, whose members can be killed, stopped and started again.

Needs Debian's etcd-server, or any `etcd` of 3.4 or later in PATH; tests are skipped without it.
"""

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

import pytest

from resilient_jax.store.etcd_address import EtcdAddress
from resilient_jax.transport import TlsFiles

ETCD = shutil.which("etcd")
needs_etcd = pytest.mark.skipif(ETCD is None, reason="etcd is not installed: apt-get install etcd-server")
FIRST_PORT, LAST_PORT = 20_000, 32_000
"""Below the ports that the kernel gives to outgoing connections."""
START_TIMEOUT_S = 30.0
ELECTION = ("--heartbeat-interval=50", "--election-timeout=500")


class EtcdCluster:
    """Three members, in folders of `directory`. Enter it to start them; all are killed on leaving."""

    def __init__(
        self,
        directory: Path,
        members: int = 3,
        options: Sequence[str] = ELECTION,
        tls: TlsFiles | None = None,
    ) -> None:
        ports = _find_free_ports(2 * members)
        self._client_ports, self._peer_ports = ports[:members], ports[members:]
        self._directory = directory
        self._options = options
        self._tls = tls
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * members

    @property
    def address(self) -> EtcdAddress:
        """The address of the cluster, without a namespace."""
        return EtcdAddress(tuple(f"127.0.0.1:{port}" for port in self._client_ports))

    def __enter__(self) -> "EtcdCluster":
        try:
            for member in range(len(self._processes)):
                self.start(member)
            self.find_leader()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for member in range(len(self._processes)):
            self.kill(member)

    def start(self, member: int) -> None:
        """Start a member, with the data that it had."""
        assert ETCD is not None, "tests without etcd are skipped"
        peers = ",".join(f"m{n}=http://127.0.0.1:{port}" for n, port in enumerate(self._peer_ports))
        client = self._make_url(member)
        peer = f"http://127.0.0.1:{self._peer_ports[member]}"
        command = (
            *(ETCD, f"--name=m{member}", f"--data-dir={self._directory / f'm{member}'}", *self._options),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            *(f"--initial-cluster={peers}", f"--initial-cluster-token={self._directory.name}"),
        )
        if self._tls is not None:
            command += (f"--cert-file={self._tls.certificate}", f"--key-file={self._tls.key}")
            command += (f"--trusted-ca-file={self._tls.authority}", "--client-cert-auth")
        log = (self._directory / f"m{member}.log").open("ab")
        with log:
            self._processes[member] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def signal(self, member: int, number: signal.Signals) -> None:
        """Send a member a signal."""
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
        for member, process in enumerate(self._processes):
            if process is None or process.poll() is not None:
                self.start(member)
            else:
                process.send_signal(signal.SIGCONT)
        self.find_leader()

    def find_leader(self) -> int:
        """Return the member that leads, once one does and a majority has answered."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(StopIteration):
                return next(
                    member
                    for member, status in self._statuses()
                    if status.get("leader") and status["leader"] == status["header"]["member_id"]
                )
            time.sleep(0.05)
        logs = "\n".join(path.read_text()[-2000:] for path in sorted(self._directory.glob("*.log")))
        raise AssertionError(f"no leader within {START_TIMEOUT_S:g} s:\n{logs}")

    def request(self, member: int, path: str, body: Mapping[str, str] | None = None) -> dict:
        """Return the answer of a member to a request to its JSON interface."""
        context = None
        if self._tls is not None:
            context = ssl.create_default_context(cafile=self._tls.authority)
            context.load_cert_chain(self._tls.certificate, self._tls.key)
        url, data = f"{self._make_url(member)}/v3/{path}", json.dumps(body or {}).encode()
        with urllib.request.urlopen(url, data=data, timeout=1.0, context=context) as response:
            return json.load(response)

    def _make_url(self, member: int) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self._client_ports[member]}"

    def _statuses(self) -> Iterator[tuple[int, dict]]:
        for member in range(len(self._processes)):
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
    raise AssertionError("no free ports")
