"""What was made of TLS files, made anew when the files change: certificates are renewed while a job runs.

Connections that exist keep what they were made with, and each new one takes what is in the files then. Files that are
being replaced just now, one after the other, do not fit each other for a moment: then the last that did is used.
"""

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from resilient_jax.errors import ConfigError
from resilient_jax.transport.credentials import TlsFiles, find_damaged_file

T = TypeVar("T")
Stamp = tuple[tuple[int, int, int], ...]

logger = logging.getLogger(__name__)


class RenewedFiles(Generic[T]):
    """The value that `make` returns for TLS files; safe to share between threads."""

    def __init__(self, tls: TlsFiles, make: Callable[[TlsFiles], T]) -> None:
        """Make the first value.

        Raises:
            ConfigError: a file cannot be read, or is not what it should be.
        """
        self._tls = tls
        self._make = make
        self._lock = threading.Lock()
        self._stamp = self._read_stamp()
        self._value = make(tls)

    def get(self) -> T:
        """Return the value for the files as they are now, or for the last ones that could be used."""
        with self._lock:
            stamp = self._read_stamp()
            if stamp != self._stamp:
                try:
                    if (damage := find_damaged_file(self._tls)) is not None:
                        raise ConfigError(damage)
                    self._value = self._make(self._tls)
                    self._stamp = stamp
                except ConfigError as error:
                    logger.debug("TLS files are not renewed: %s", error)
            return self._value

    def _read_stamp(self) -> Stamp:
        stamp: list[tuple[int, int, int]] = []
        for path in (self._tls.certificate, self._tls.key, self._tls.authority):
            try:
                found = path.stat()
                stamp.append((found.st_ino, found.st_mtime_ns, found.st_size))
            except OSError:
                stamp.append((0, 0, 0))
        return tuple(stamp)
