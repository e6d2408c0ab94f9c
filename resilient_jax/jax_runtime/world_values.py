"""Texts that a process publishes in its world, for processes that join it later."""

import threading

from jax._src import distributed as jax_distributed

from resilient_jax.jax_runtime.jaxlib_types import JaxRuntimeError, RuntimeClient


def publish_value(key: str, text: str) -> None:
    """Publish a text under a key of this world, or replace it; nothing waits for it, and without a world it is lost.

    The call is made on a thread of its own: one to a service that is dead does not return.
    """
    client: RuntimeClient | None = jax_distributed.global_state.client
    if client is not None:
        threading.Thread(target=_set, args=(client, key, text), name="rj-publish", daemon=True).start()


def read_values(directory: str) -> dict[str, str]:
    """Return what is published under keys of the form `directory/name`, by name; nothing if the service is gone."""
    client: RuntimeClient | None = jax_distributed.global_state.client
    if client is None:
        return {}
    try:
        published = client.key_value_dir_get(directory)
    except JaxRuntimeError:
        return {}
    return {key.rpartition("/")[2]: text for key, text in published}


def try_read_values(directory: str, timeout_s: float) -> dict[str, str]:
    """Return what `read_values` does; nothing if the service has not answered after `timeout_s`.

    The call is made on a thread of its own: one to a service that is dead does not return.
    """
    values: dict[str, str] = {}
    thread = threading.Thread(
        target=lambda: values.update(read_values(directory)), name="rj-read", daemon=True
    )
    thread.start()
    thread.join(timeout_s)
    return {} if thread.is_alive() else values


def _set(client: RuntimeClient, key: str, text: str) -> None:
    try:
        client.key_value_set(key, text, True)
    except JaxRuntimeError:
        return
