"""The thread that sends one host's mail to one peer, in order."""

import collections
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from resilient_jax.errors import PeerUnreachable, ResilientJaxError
from resilient_jax.ids import HostName
from resilient_jax.transport.mail_protocol import Mail, send_mail
from resilient_jax.transport.peer_connection import CONNECT_TIMEOUT_S, OpenSockets, PeerConnector

OnEnd = Callable[[HostName, ResilientJaxError], None]
"""Called once, on the sender's thread, when the peer is lost."""
ERROR_EVENTS: Final = select.POLLIN | select.POLLHUP | select.POLLERR | select.POLLNVAL
"""The peer sends nothing after its welcome, so whatever there is to read is the end."""


class MailSender:
    """Sends to one peer; safe to share between threads.

    The thread connects when there is first something to send. Nothing is sent twice and nothing is tried again: what
    has arrived of a connection that broke is not known here.
    """

    def __init__(self, own_name: HostName, peer: HostName, connector: PeerConnector, on_end: OnEnd) -> None:
        self.address = connector.address
        self._peer = peer
        self._connector = connector
        self._on_end = on_end
        self._sockets = OpenSockets(f"the sender of mail to {peer}")
        self._changed = threading.Condition()  # guards the attributes below
        self._queue: collections.deque[Mail] = collections.deque()
        self._is_sending = False
        self._is_closed = False
        self._error: ResilientJaxError | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"rj-mail-{own_name}-to-{peer}", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the connection ended, or none could be made."""
        with self._changed:
            return self._error is not None

    @property
    def has_sent(self) -> bool:
        """Whether the kernel has everything, or the peer is lost."""
        with self._changed:
            return self._error is not None or not (self._queue or self._is_sending)

    def send(self, mail: Mail) -> None:
        """Have the thread send a mail; this does not wait. What is sent to a lost peer is dropped."""
        with self._changed:
            if self._error is None and not self._is_closed:
                self._queue.append(mail)
                self._notify()

    def drop(self, is_dropped: Callable[[Mail], bool]) -> None:
        """Take mail out of the queue."""
        with self._changed:
            self._queue = collections.deque(mail for mail in self._queue if not is_dropped(mail))
            self._changed.notify_all()

    def wait_sent(self, deadline_s: float) -> None:
        """Wait until the kernel has everything.

        Raises:
            ResilientJaxError: the peer is lost.
            PeerUnreachable: the deadline, of the monotonic clock, has passed.
        """
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._error is not None or not (self._queue or self._is_sending),
                max(0.0, deadline_s - time.monotonic()),
            )
            if self._error is not None:
                raise self._error
            if not done:
                raise PeerUnreachable(
                    f"{self._peer} has not taken {len(self._queue) + self._is_sending} mails in time"
                )

    def close(self) -> None:
        """Drop what is not sent, and end the thread and its connection; not to be called on the thread."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._notify()
        self._sockets.shut_down()
        self._thread.join()
        os.close(self._wake)

    def _notify(self) -> None:
        self._changed.notify_all()
        with contextlib.suppress(BlockingIOError):  # the counter is full: the thread is awake anyway
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        connection: socket.socket | None = None
        try:
            while self._wait_for_mail(connection):
                if connection is None:
                    deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
                    connection = self._connector.connect(deadline_s, self._sockets)
                self._send_queued(connection)
        except (OSError, EOFError) as error:
            lost = PeerUnreachable(f"{self._peer} at {self.address} takes no more mail: {error}")
            lost.__cause__ = error
            self._end(lost)
        except ResilientJaxError as error:
            self._end(error)
        finally:
            if connection is not None:
                self._sockets.close(connection)

    def _wait_for_mail(self, connection: socket.socket | None) -> bool:
        """Return whether there is mail to send: False once closed.

        Raises:
            EOFError: the connection has ended meanwhile.
        """
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if connection is not None:
            poll.register(connection, select.POLLIN)
        while True:
            with self._changed:
                if self._is_closed:
                    return False
                if self._queue:
                    return True
            events = dict(poll.poll())
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            if connection is not None and events.get(connection.fileno(), 0) & ERROR_EVENTS:
                raise EOFError("the other side closed the connection")

    def _send_queued(self, connection: socket.socket) -> None:
        while True:
            with self._changed:
                self._is_sending = bool(self._queue)
                if not self._queue:
                    self._changed.notify_all()
                    return
                mail = self._queue.popleft()
            send_mail(connection, mail)

    def _end(self, error: ResilientJaxError) -> None:
        with self._changed:
            self._queue.clear()
            self._is_sending = False
            if not self._is_closed:
                self._error = error
            self._changed.notify_all()
            is_closed = self._is_closed
        if not is_closed:
            self._on_end(self._peer, error)
