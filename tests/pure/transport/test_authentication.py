"""What a process without the job's token may not do, and what is said about it."""

import secrets
from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import MessageError, Unauthenticated
from resilient_jax.events import EventKind
from resilient_jax.transport import call_proofs
from resilient_jax.transport.authentication import MAX_PEERS_REPORTED, Authenticator
from resilient_jax.transport.call_proofs import (
    CALL_KEY,
    NONCE_BYTES,
    WINDOW,
    CallSession,
    Introduction,
    NumberWindow,
    StaleSession,
    Token,
)
from resilient_jax.transport.method import Method, encode

TOKEN = "0123456789abcdef"
PATH = "/service/ping"


class Ping(msgspec.Struct):
    """A request."""

    text: str


PING = Method("ping", Ping, Ping)
HELLO = encode(Ping("hello"))
WRONG = {
    "a prefix": TOKEN[:-1],
    "its first character": TOKEN[:1],
    "nothing": "",
    "one character more": TOKEN + "0",
    "white space after it": TOKEN + " ",
    "twice the token": TOKEN * 2,
    "another of its length": TOKEN[:-1] + "0",
    "other letters": TOKEN.upper(),
    "a suffix": TOKEN[1:],
}


def open_session(checked: Authenticator, token: str = TOKEN) -> CallSession:
    """Return a session as a client with this token has it."""
    return CallSession(Token(token), secrets.token_bytes(NONCE_BYTES), checked.tell_nonce().nonce)


def sign(checked: Authenticator, token: str = TOKEN, data: bytes = HELLO) -> tuple[tuple[str, bytes], ...]:
    """Return the metadata of a call by a client with this token."""
    return open_session(checked, token).sign_call(PATH, data)[1]


def ask(
    checked: Authenticator, metadata: Iterable[tuple[str, str | bytes]] | None, peer: str = "ipv4:10.0.0.1:5"
) -> Ping:
    request, _ = checked.decode_authenticated(HELLO, PING, metadata, peer, PATH)
    return request


def introduce(checked: Authenticator, token: str, address: str = "10.0.0.9:1") -> bytes:
    unsigned = Introduction(bytes(NONCE_BYTES), checked.tell_nonce().nonce, address)
    proof = Token(token).sign(unsigned.signed_text(b"hello"))
    return checked.welcome(msgspec.structs.replace(unsigned, proof=proof), "ipv4:10.0.0.1:5", PATH).proof


def test_the_proof_of_the_token_is_enough_and_the_answer_proves_it_too() -> None:
    checked = Authenticator(TOKEN, None)
    session = open_session(checked)
    number, metadata = session.sign_call(PATH, HELLO)
    request, answer = checked.decode_authenticated(
        HELLO, PING, [("other", "x"), *metadata], "ipv4:10.0.0.1:5", PATH
    )
    assert request.text == "hello"
    assert session.is_answer(number, answer)
    assert not session.is_answer(number + 1, answer)
    assert not open_session(checked).is_answer(number, answer)


def test_the_token_is_in_nothing_that_is_sent() -> None:
    checked = Authenticator(TOKEN, None)
    sent = [sign(checked)[0][1], introduce(checked, TOKEN), checked.tell_nonce().nonce]
    assert not any(TOKEN.encode() in part for part in sent)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_any_other_token_is_refused(wrong: str) -> None:
    checked = Authenticator(TOKEN, None)
    with pytest.raises(Unauthenticated, match="the proof of it is wrong"):
        ask(checked, sign(checked, wrong))
    with pytest.raises(Unauthenticated, match="the proof of it is wrong"):
        introduce(checked, wrong)


def test_a_server_proves_itself_to_who_has_proved_the_token_alone_and_for_one_address() -> None:
    checked = Authenticator(TOKEN, None)
    proof = introduce(checked, TOKEN)
    assert proof == introduce(checked, TOKEN)
    assert proof != introduce(checked, TOKEN, "10.0.0.9:2")
    nonce = checked.tell_nonce().nonce
    assert proof != checked.sign(Introduction(bytes(NONCE_BYTES), nonce, "10.0.0.9:1").signed_text(b"hello"))


@pytest.mark.parametrize("metadata", [None, [], [("token", TOKEN)], [("rj-token", TOKEN)]])
def test_a_call_without_a_proof_is_refused(metadata: list[tuple[str, str | bytes]] | None) -> None:
    with pytest.raises(Unauthenticated, match="a proof of it is missing"):
        ask(Authenticator(TOKEN, None), metadata)


@pytest.mark.parametrize("call", [b"", bytes(72), bytes(73), TOKEN.encode(), TOKEN])
def test_bytes_that_prove_nothing_are_refused(call: str | bytes) -> None:
    with pytest.raises(Unauthenticated, match="the proof of it is wrong"):
        ask(Authenticator(TOKEN, None), [(CALL_KEY, call)])


def test_a_proof_is_for_one_call_of_one_method_with_one_request_at_one_server() -> None:
    checked = Authenticator(TOKEN, None)
    metadata = sign(checked)
    with pytest.raises(Unauthenticated):
        checked.decode_authenticated(HELLO, PING, metadata, "ipv4:10.0.0.1:5", PATH + "2")
    with pytest.raises(Unauthenticated):
        checked.decode_authenticated(HELLO + b"x", PING, metadata, "ipv4:10.0.0.1:5", PATH)
    with pytest.raises(StaleSession):
        ask(Authenticator(TOKEN, None), metadata)
    assert ask(checked, metadata).text == "hello"
    with pytest.raises(Unauthenticated):
        ask(checked, metadata)


def test_a_stranger_is_not_told_that_a_session_is_stale() -> None:
    with pytest.raises(Unauthenticated):
        ask(Authenticator(TOKEN, None), sign(Authenticator(TOKEN, None), "another"))


@given(st.lists(st.integers(1, 3 * WINDOW), max_size=60))
def test_a_number_is_used_once_in_any_order_of_arrival(numbers: list[int]) -> None:
    window, used = NumberWindow(), set[int]()
    for number in numbers:
        is_new = number not in used and number > max(used, default=0) - WINDOW
        assert window.use(number) == is_new
        used |= {number} if is_new else set()


def test_sessions_take_memory_up_to_a_bound_and_those_of_strangers_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_proofs, "MAX_SESSIONS", 10)
    checked = Authenticator(TOKEN, None)
    for _ in range(50):
        with pytest.raises(Unauthenticated):
            ask(checked, sign(checked, "another"))
    assert not checked._sessions._sessions
    first = sign(checked)
    for _ in range(50):
        ask(checked, sign(checked))
        assert len(checked._sessions._sessions) <= 10
    with pytest.raises(StaleSession):
        ask(checked, first)


def test_nothing_is_decoded_for_a_peer_without_the_token() -> None:
    """A decoder that a stranger reaches is one more way in."""
    checked = Authenticator(TOKEN, None)
    with pytest.raises(Unauthenticated):
        checked.decode_authenticated(b"\xc1", PING, None, "ipv4:10.0.0.1:5", PATH)
    metadata = sign(checked, data=b"\xc1")
    with pytest.raises(MessageError, match=r"request of /service/ping from ipv4:10\.0\.0\.1:5"):
        checked.decode_authenticated(b"\xc1", PING, metadata, "ipv4:10.0.0.1:5", PATH)


def test_a_signature_proves_the_token_for_one_text_alone() -> None:
    ours, theirs = Authenticator(TOKEN, None), Authenticator(TOKEN, None)
    proof = ours.sign(b"a text")
    assert theirs.is_signature(b"a text", proof)
    for text, other in (
        (b"another text", proof),
        (b"a text", proof[:-1]),
        (b"a text", proof + b"\0"),
        (b"a text", b""),
        (b"a text", bytes([proof[0] ^ 1]) + proof[1:]),
        (b"a text", Authenticator(TOKEN[:-1], None).sign(b"a text")),
        (b"a text", TOKEN.encode()),
    ):
        assert not theirs.is_signature(text, other)
        with pytest.raises(Unauthenticated, match="the proof of it is wrong"):
            theirs.check_signature(text, other, "ipv4:10.0.0.1:5", PATH)
    theirs.check_signature(b"a text", proof, "ipv4:10.0.0.1:5", PATH)


def test_the_first_refusal_of_each_address_is_reported() -> None:
    said: list[tuple[EventKind, dict]] = []
    checked = Authenticator(TOKEN, lambda kind, detail: said.append((kind, detail)))
    for peer in ("ipv4:10.0.0.1:5", "ipv4:10.0.0.1:6", "ipv4:10.0.0.2:5"):
        with pytest.raises(Unauthenticated):
            ask(checked, None, peer)
    assert [(kind, detail["peer"]) for kind, detail in said] == [
        (EventKind.REQUEST_UNAUTHENTICATED, "10.0.0.1"),
        (EventKind.REQUEST_UNAUTHENTICATED, "10.0.0.2"),
    ]
    assert not any(TOKEN in str(detail) for _, detail in said), "the token is in no event"


def test_many_addresses_fill_no_memory() -> None:
    said: list[str] = []
    checked = Authenticator(TOKEN, lambda kind, detail: said.append(str(detail["peer"])))
    for number in range(MAX_PEERS_REPORTED + 50):
        with pytest.raises(Unauthenticated):
            ask(checked, None, f"ipv4:10.0.{number // 256}.{number % 256}:5")
    assert len(said) == MAX_PEERS_REPORTED + 1
    assert said[-1] == "others"
