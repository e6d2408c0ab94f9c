"""A process with a mailbox that executes a test's orders, one JSON object a line; it answers each with one.

argv: its name, the job's token, and the folder with its TLS files or "".
"""

import json
import sys
import time
import zlib
from pathlib import Path

from resilient_jax.errors import ResilientJaxError
from resilient_jax.ids import HostName
from resilient_jax.transport import Credentials, TlsFiles
from resilient_jax.transport.mail_protocol import Mail, MailKey, MailKind
from resilient_jax.transport.mail_service import MailService
from tests.process.transport.mail_peers import make_bytes
from tests.support.patience import patience


def make_key(fields) -> MailKey:
    generation, step, kind, microbatch, block = fields
    return MailKey(generation, step, MailKind(kind), microbatch, block)


def execute(service: MailService, order: dict) -> dict:
    match order["do"]:
        case "begin":
            service.enter(order["generation"], order["peers"])
            return {}
        case "send":
            data = memoryview(make_bytes(order["length"], order["seed"]))[: order["length"]]
            for _ in range(order.get("copies", 1)):
                mail = Mail(
                    key=make_key(order["key"]), data=data, dtype="float32", shape=(order["length"] // 4,)
                )
                service.send(order["to"], mail)
            return {}
        case "take":
            deadline_s = time.monotonic() + order.get("timeout_s", 60.0)
            mail = service.take(
                make_key(order["key"]), sender=order["sender"], deadline_s=deadline_s, check=lambda: None
            )
            return {
                "length": mail.data.nbytes,
                "crc": zlib.crc32(mail.data),
                "dtype": mail.dtype,
                "shape": mail.shape,
            }
        case "flush":
            service.wait_sent(time.monotonic() + patience(6))
            return {}
    raise ValueError(order)


def main() -> None:
    name, token, folder = sys.argv[1:]
    tls = None
    if folder:
        tls = TlsFiles(
            Path(folder, f"{name}.pem"), Path(folder, f"{name}.key"), Path(folder, "authority.pem")
        )
    lost: list[str] = []
    service = MailService(
        HostName(name), "127.0.0.1", Credentials(token, tls), lambda peer, error: lost.append(peer)
    )
    print(json.dumps({"address": service.address}), flush=True)
    for line in sys.stdin:
        try:
            found = execute(service, json.loads(line))
        except ResilientJaxError as error:
            found = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps({**found, "lost": lost}), flush=True)
    service.close()
