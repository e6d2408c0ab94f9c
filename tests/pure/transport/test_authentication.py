"""What a process without the job's token may not do, and what is said about it."""

import msgspec
import pytest

from resilient_jax.errors import MessageError, Unauthenticated
from resilient_jax.events import EventKind
from resilient_jax.transport.authentication import MAX_PEERS_REPORTED, TOKEN_METADATA_KEY, Authenticator
from resilient_jax.transport.method import Method, encode

TOKEN = "0123456789abcdef"
PATH = "/service/ping"


class Ping(msgspec.Struct):
    """A request."""

    text: str


PING = Method("ping", Ping, Ping)
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


def ask(
    checked: Authenticator, metadata: list[tuple[str, str | bytes]] | None, peer: str = "ipv4:10.0.0.1:5"
) -> Ping:
    return checked.decode_authenticated(encode(Ping("hello")), PING, metadata, peer, PATH)


@pytest.mark.parametrize("kind", [str, str.encode], ids=["text", "bytes"])
def test_the_token_is_enough(kind) -> None:
    assert (
        ask(Authenticator(TOKEN, None), [("other", "x"), (TOKEN_METADATA_KEY, kind(TOKEN))]).text == "hello"
    )


@pytest.mark.parametrize("kind", [str, str.encode], ids=["text", "bytes"])
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_any_other_token_is_refused(wrong: str, kind) -> None:
    checked = Authenticator(TOKEN, None)
    with pytest.raises(Unauthenticated, match="it is wrong"):
        ask(checked, [(TOKEN_METADATA_KEY, kind(wrong))])
    assert checked.num_unauthenticated == 1


@pytest.mark.parametrize("metadata", [None, [], [("token", TOKEN)], [("rj-token-", TOKEN)]])
def test_a_call_without_a_token_is_refused(metadata: list[tuple[str, str | bytes]] | None) -> None:
    with pytest.raises(Unauthenticated, match="it is missing"):
        ask(Authenticator(TOKEN, None), metadata)


def test_nothing_is_decoded_for_a_peer_without_the_token() -> None:
    """A decoder that a stranger reaches is one more way in."""
    with pytest.raises(Unauthenticated):
        Authenticator(TOKEN, None).decode_authenticated(b"\xc1", PING, None, "ipv4:10.0.0.1:5", PATH)
    metadata: list[tuple[str, str | bytes]] = [(TOKEN_METADATA_KEY, TOKEN)]
    with pytest.raises(MessageError, match=r"request of /service/ping from ipv4:10\.0\.0\.1:5"):
        Authenticator(TOKEN, None).decode_authenticated(b"\xc1", PING, metadata, "ipv4:10.0.0.1:5", PATH)


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


def test_the_first_refusal_of_each_address_is_reported_and_all_are_counted() -> None:
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
    assert checked.num_unauthenticated == 3


def test_many_addresses_fill_no_memory() -> None:
    said: list[str] = []
    checked = Authenticator(TOKEN, lambda kind, detail: said.append(str(detail["peer"])))
    for number in range(MAX_PEERS_REPORTED + 50):
        with pytest.raises(Unauthenticated):
            ask(checked, None, f"ipv4:10.0.{number // 256}.{number % 256}:5")
    assert len(said) == MAX_PEERS_REPORTED + 1
    assert said[-1] == "others"
    assert checked.num_unauthenticated == MAX_PEERS_REPORTED + 50
