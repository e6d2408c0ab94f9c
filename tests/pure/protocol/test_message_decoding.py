"""Bytes from elsewhere that nest deeper than the stack are refused as others that do not decode are."""

import re
from pathlib import Path

import msgspec
import pytest

import resilient_jax
from resilient_jax.cluster.run_directory import CONTACT_FILE, read_contact
from resilient_jax.cluster.stored_records import decode_record
from resilient_jax.config import JobConfig, load_toml
from resilient_jax.errors import ConfigError, JoinRefused, MessageError
from resilient_jax.ids import Revision
from resilient_jax.local_job.log_tail import tail_events
from resilient_jax.planning.calibration import load_calibration
from resilient_jax.planning.model_file import load_model_shape
from resilient_jax.protocol.connection import MessageDecoder
from resilient_jax.protocol.failpoints import FailPoint, FailPoints
from resilient_jax.protocol.framing import encode_frame
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.job_records import JobRecord
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.protocol.worker_messages import WORKER_ORDER_DECODER, Quiesce
from resilient_jax.snapshot.manifest import decode_manifest, encode_manifest
from resilient_jax.snapshot.messages import SETTINGS_ENV_VARIABLE
from resilient_jax.snapshot.server import read_settings
from resilient_jax.store.interface import KeyValue
from resilient_jax.store.messages import TransactionRequest
from resilient_jax.telemetry.event_log import read_events
from resilient_jax.topology import load_topology
from resilient_jax.transport.method import decode
from tests.chaos.ledgers import tail_ledger

DEPTH = 100_000
LISTS = b"\x91" * DEPTH + b"\xc0"
MSGPACK = b"\x81\xa1x" + LISTS
"""A map with one unknown key, which a decoder skips as far as the stack goes."""
JSON_LISTS = b"[" * DEPTH + b"]" * DEPTH
JSON = b'{"x":' + JSON_LISTS + b"}"
TOML = f"x = {JSON_LISTS.decode()}\n"
DEEP = "nested too deeply"


def load_config(path: Path) -> JobConfig:
    """Return the configuration of a job."""
    return load_toml(path, JobConfig)


STORED = KeyValue(
    key="/job/hosts/a", value=MSGPACK, create_revision=Revision(1), mod_revision=Revision(1), version=1
)


@pytest.mark.parametrize(
    ("decoder", "data"),
    [
        (msgspec.msgpack.Decoder(Quiesce), MSGPACK),
        (msgspec.msgpack.Decoder(), LISTS),
        (msgspec.json.Decoder(Quiesce), JSON),
        (msgspec.json.Decoder(), JSON_LISTS),
    ],
)
def test_deep_containers_are_refused_with_source_and_expected_type(decoder, data):
    with pytest.raises(
        MessageError, match=rf"^the mail does not decode as \w+: .*{DEEP}\. Run the same version"
    ):
        decode_message(decoder, data, "the mail")


def test_a_string_that_is_not_utf_8_is_refused_alike():
    with pytest.raises(MessageError, match=r"(?i)the mail does not decode as str: .*utf-8"):
        decode_message(msgspec.msgpack.Decoder(str), b"\xa1\xff", "the mail")


def test_a_message_of_another_process_is_refused():
    with pytest.raises(MessageError, match=f"a message of another process does not decode.*{DEEP}"):
        MessageDecoder(WORKER_ORDER_DECODER).feed(encode_frame(b"\0" + MSGPACK))


def test_a_request_is_refused():
    with pytest.raises(
        MessageError, match=f"request to /store/transaction does not decode as TransactionRequest: .*{DEEP}"
    ):
        decode(MSGPACK, TransactionRequest, "request to /store/transaction")


@pytest.mark.parametrize("record_type", [Generation, HostStatus, JobRecord])
def test_a_record_in_the_store_is_refused_with_its_key(record_type):
    with pytest.raises(JoinRefused, match=f"the record /job/hosts/a in the store does not decode.*{DEEP}"):
        decode_record(STORED, record_type)


def test_a_manifest_is_refused(monkeypatch):
    monkeypatch.setattr(msgspec.msgpack, "encode", lambda manifest: MSGPACK)
    data = encode_manifest(None)  # pyright: ignore[reportArgumentType] - the manifest is not looked at
    with pytest.raises(MessageError, match=f"manifest does not decode.*{DEEP}"):
        decode_manifest(data)


def test_settings_of_a_snapshot_server_are_refused(monkeypatch):
    monkeypatch.setenv(
        SETTINGS_ENV_VARIABLE, JSON[: DEPTH + 5].decode()
    )  # the kernel limits a variable to 128 KiB
    with pytest.raises(ConfigError, match=f"{SETTINGS_ENV_VARIABLE} does not decode.*{DEEP}.*Only an agent"):
        read_settings()


def test_a_line_of_an_event_log_is_refused_with_its_number(tmp_path):
    path = tmp_path / "a.events.jsonl"
    path.write_bytes(JSON + b"\n")
    with pytest.raises(MessageError, match=f"a.events.jsonl, line 1, does not decode as Event: .*{DEEP}"):
        read_events(path)


def test_lines_of_running_logs_and_of_ledgers_are_skipped(tmp_path):
    for name in ("a.events.jsonl", "a.jsonl"):
        (tmp_path / name).write_bytes(JSON + b"\n")
    assert tail_events(tmp_path).poll() == []
    assert tail_ledger(tmp_path).poll() == []


def test_orders_for_failpoints_are_ignored(tmp_path):
    (tmp_path / "orders.json").write_bytes(b"[" + JSON + b"]")
    assert not FailPoints(tmp_path, "a").hit(FailPoint.BEFORE_MICROBATCH, step=1)


def test_the_contact_of_a_job_is_refused(tmp_path):
    (tmp_path / CONTACT_FILE).write_bytes(JSON)
    with pytest.raises(ConfigError, match=f"{CONTACT_FILE} does not decode as JobContact.*{DEEP}"):
        read_contact(tmp_path)


@pytest.mark.parametrize("load", [load_model_shape, load_calibration, load_topology, load_config])
def test_a_toml_file_is_refused_with_its_path(load, tmp_path):
    path = tmp_path / "deep.toml"
    path.write_text(TOML, "utf-8")
    with pytest.raises(ConfigError, match=r"deep\.toml: found (text that is not|no) TOML"):
        load(path)


def test_nothing_else_decodes_messages():
    """Every other place would have to know msgspec's three errors."""
    direct = re.compile(
        r"(DECODER|_decoder\(\w*\)|_decoder|msgspec\.(json|msgpack))\.decode\(|\bDecodeError\b"
    )
    found = {
        path.name
        for path in Path(resilient_jax.__file__).parent.rglob("*.py")
        if direct.search(path.read_text("utf-8"))
    }
    assert found == {"message_decoding.py"}
