"""The box of values by key: one copy of each, nothing that is too old, and waits that end."""

import time

import pytest

from resilient_jax.errors import PeerUnreachable, StaleGeneration
from resilient_jax.ids import HostName
from resilient_jax.transport.mail_protocol import Mail, MailKey, MailKind
from resilient_jax.transport.mailbox import Mailbox
from tests.support.patience import patience

PEER = HostName("h1")
WAIT_S = patience(6)


def key(microbatch=0, generation=1, step=0):
    return MailKey(generation, step, MailKind("activation"), microbatch, 3)


def mail(data, **fields):
    return Mail(key=key(**fields), data=memoryview(data))


def take(box, of, timeout_s=WAIT_S, check=lambda: None):
    return bytes(box.take(of, sender=PEER, deadline_s=time.monotonic() + timeout_s, check=check).data)


def test_values_are_taken_in_any_order():
    box = Mailbox()
    for number in range(3):
        assert box.put(mail(bytes([number]), microbatch=number))
    assert [take(box, key(number)) for number in (2, 0, 1)] == [b"\2", b"\0", b"\1"]


def test_a_second_copy_is_dropped_also_after_the_first_was_taken():
    box = Mailbox()
    assert box.put(mail(b"first"))
    assert not box.put(mail(b"second"))
    assert take(box, key()) == b"first"
    assert not box.put(mail(b"third"))
    assert box.try_take(key()) is None


def test_what_is_older_than_the_generation_or_the_step_is_refused_and_dropped():
    box = Mailbox()
    box.put(mail(b"old", generation=1))
    box.enter(2)
    assert box.try_take(key(generation=1)) is None
    assert not box.put(mail(b"old", generation=1))
    assert box.put(mail(b"now", generation=2, step=4))
    assert box.put(mail(b"the sender was faster", generation=3, step=5))
    box.finish_step(4)
    assert not box.put(mail(b"late", generation=2, step=4))
    assert take(box, key(generation=3, step=5)) == b"the sender was faster"
    with pytest.raises(StaleGeneration, match="activation of microbatch 0 for block 3, step 4, generation 2"):
        take(box, key(generation=2, step=4))


def test_a_wait_ends_at_its_deadline_and_names_what_is_missing_from_whom_and_what_is_here():
    box = Mailbox()
    box.put(mail(b"other", microbatch=7))
    with pytest.raises(PeerUnreachable) as raised:
        take(box, key(2), timeout_s=0.0)
    assert "activation of microbatch 2 for block 3" in str(raised.value)
    assert "h1 has not sent it" in str(raised.value)
    assert "Here instead: activation of microbatch 7" in str(raised.value)
    take(box, key(7))
    with pytest.raises(PeerUnreachable, match="it was taken already"):
        take(box, key(7), timeout_s=0.0)


def test_a_wait_ends_with_what_its_check_raises():
    box, asked = Mailbox(), []

    def check():
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take(box, key(), check=check)


def test_a_silent_sender_ends_waits_for_what_it_has_not_sent_until_the_next_generation():
    box = Mailbox()
    box.put(mail(b"sent before", microbatch=1))
    box.mark_silent(PEER, PeerUnreachable("h1 died"))
    assert take(box, key(1)) == b"sent before"
    with pytest.raises(PeerUnreachable, match="h1 died"):
        take(box, key(2))
    box.enter(2)
    with pytest.raises(PeerUnreachable, match="has not sent it"):
        take(box, key(2, generation=2), timeout_s=0.0)


def test_closing_the_box_ends_a_wait():
    box = Mailbox()
    box.close()
    with pytest.raises(PeerUnreachable, match="was closed"):
        take(box, key())
