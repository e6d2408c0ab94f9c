"""The values that have arrived on a host, by key, until they are taken.

A value may come twice: after a failure hosts send it again that do not know whether the first copy arrived. All copies
have the same bits, so the first one is kept, and a key that was taken is remembered, until `enter` or
`finish_step` makes it too old.
"""

import copy
import threading
import time
from collections.abc import Callable
from typing import Final

from resilient_jax.errors import PeerUnreachable, ResilientJaxError, StaleGeneration
from resilient_jax.ids import HostName
from resilient_jax.transport.mail_protocol import Mail, MailKey, MailKind

CHECK_INTERVAL_S: Final = 0.05
"""How often a wait asks whether it is to go on, if nothing wakes it before."""
MAX_NAMED_KEYS: Final = 8
"""Of what has arrived instead, so many are in the message of an error."""


class Mailbox:
    """Values of this host by key; safe to share between threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the attributes below
        self._mail: dict[MailKey, Mail] = {}
        self._taken: set[MailKey] = set()
        self._silent: dict[HostName, ResilientJaxError] = {}
        self._generation = 0
        self._first_step = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        with self._changed:
            return self._is_closed

    def put(self, mail: Mail) -> bool:
        """Keep a value; return False if it is too old, or a second copy.

        A value of a later generation is kept: its sender has only been faster.
        """
        key = mail.key
        with self._changed:
            if self._is_old(key) or key in self._mail or key in self._taken:
                return False
            self._mail[key] = mail
            self._changed.notify_all()
            return True

    def try_take(self, key: MailKey) -> Mail | None:
        """Return the value if it is here; it is then no longer in the box."""
        with self._changed:
            return self._pop(key)

    def try_take_kind(self, kind: MailKind, accept: Callable[[MailKey], bool] | None = None) -> Mail | None:
        """Return the first value of a kind, by key, if there is one here; it is then no longer in the box.

        Args:
            accept: whether a value with this key may be taken; None: any may.
        """
        with self._changed:
            found = [key for key in self._mail if key.kind == kind and (accept is None or accept(key))]
            return self._pop(min(found)) if found else None

    def wait_for_more(self, timeout_s: float) -> bool:
        """Wait until a value arrives or the time has passed; return whether some host sends no more."""
        with self._changed:
            self._changed.wait(timeout_s)
            return bool(self._silent)

    def take(self, key: MailKey, *, sender: HostName, deadline_s: float, check: Callable[[], None]) -> Mail:
        """Wait for a value, and return it; it is then no longer in the box.

        Args:
            deadline_s: monotonic time of the limit.
            check: called again and again while this waits; what `check` raises ends the wait.

        Raises:
            PeerUnreachable: the deadline has passed, the sender sends no more, or the box was closed.
            StaleGeneration: the key is of an older generation or a finished step.
        """
        while True:
            check()  # outside of the lock: it may wait, or report to this box
            with self._changed:
                if (mail := self._pop(key)) is not None:
                    return mail
                if self._is_old(key):
                    raise StaleGeneration(
                        f"{key}: it is waited for, but generation {self._generation}, step {self._first_step} has begun"
                    )
                if self._is_closed:
                    raise PeerUnreachable(f"{key}: this host's mailbox was closed")
                if sender in self._silent:
                    raise copy.copy(self._silent[sender])  # each raise adds to a traceback of its own
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise PeerUnreachable(self._describe_missing(key, sender))
                self._changed.wait(min(left_s, CHECK_INTERVAL_S))

    def mark_silent(self, sender: HostName, error: ResilientJaxError | None) -> None:
        """End waits for what a host has not sent, present and later ones of this generation.

        Args:
            error: error that the waits raise; None: another process of the host is there, and sends.
        """
        with self._changed:
            if error is None:
                self._silent.pop(sender, None)
            else:
                self._silent.setdefault(sender, error)
            self._changed.notify_all()

    def enter(self, generation: int) -> None:
        """Refuse values of older generations from now on, drop those that are here, and count no host as silent.

        Steps begin anew, as a generation may go back to a step that was finished.
        """
        with self._changed:
            if generation > self._generation:
                self._generation, self._first_step = generation, 0
            self._silent.clear()
            self._drop_old()

    def finish_step(self, step: int) -> None:
        """Refuse values of this step and those before it from now on, and drop those that are here."""
        with self._changed:
            self._first_step = max(self._first_step, step + 1)
            self._drop_old()

    def close(self) -> None:
        """End every wait, present and later ones."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def check_current(self, key: MailKey) -> None:
        """Check that a value of this key is not too old to be sent.

        Raises:
            StaleGeneration: the value is too old.
        """
        with self._changed:
            if self._is_old(key):
                raise StaleGeneration(
                    f"{key}: too old to be sent, generation {self._generation}, step {self._first_step} has begun"
                )

    def _is_old(self, key: MailKey) -> bool:
        return key.generation < self._generation or key.step < self._first_step

    def _drop_old(self) -> None:
        self._mail = {key: mail for key, mail in self._mail.items() if not self._is_old(key)}
        self._taken = {key for key in self._taken if not self._is_old(key)}
        self._changed.notify_all()

    def _pop(self, key: MailKey) -> Mail | None:
        mail = self._mail.pop(key, None)
        if mail is not None:
            self._taken.add(key)
        return mail

    def _describe_missing(self, key: MailKey, sender: HostName) -> str:
        why = "it was taken already" if key in self._taken else f"{sender} has not sent it in time"
        here = [str(other) for other in sorted(self._mail)]
        rest = f" and {len(here) - MAX_NAMED_KEYS} more" if len(here) > MAX_NAMED_KEYS else ""
        return (
            f"{key}: {why}. Here instead: {'; '.join(here[:MAX_NAMED_KEYS]) or 'nothing'}{rest}. Look at the log of "
            f"{sender}, which is stopped, slow, or waits for another host"
        )
