"""The storage processes of this test, one after the other by several stores."""

from resilient_jax.checkpoint.orbax_store import OrbaxStore
from resilient_jax.checkpoint.storage_connection import StorageConnection

_idle: list[StorageConnection] = []
"""What stores of earlier tests have left: a new one imports Orbax, which is most of what a small checkpoint takes."""


def lend_process(store: OrbaxStore) -> None:
    """Have a new store ask the process that an earlier one has left, if there is one."""
    store._client._connection = _idle.pop() if _idle else None


def take_back_process(store: OrbaxStore) -> None:
    """Keep the process of a store for the next one, unless it has ended, or works for a save."""
    connection = store._client._connection
    if connection is not None and not connection.has_ended and not store.is_saving:
        store._client._connection = None
        _idle.append(connection)


def end_idle_processes() -> None:
    """End those that no store has."""
    while _idle:
        _idle.pop().close()


def find_storage_process(store: OrbaxStore) -> int:
    """Return the id of the process that a store asks."""
    connection = store._client._connection
    assert connection is not None
    return connection.pid
