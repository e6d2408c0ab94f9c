"""An interruption ends although the coordination service dies between two calls, of which the second never returns."""

import threading
import time
from typing import Any, cast

from resilient_jax.jax_runtime.clique_interruption import PUBLISH_DELAY_S, CliqueInterrupter
from resilient_jax.jax_runtime.gloo import GlooSockets


class DyingService:
    """A client whose service answers the first question and then no more, as after SIGKILL."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.calls = 0

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        return "alive"

    def key_value_dir_get_bytes(self, prefix: str) -> list[tuple[str, bytes]]:
        self.calls += 1
        self.is_over.wait()
        return []


def test_a_call_that_never_returns_holds_up_no_interruption() -> None:
    service = DyingService()
    interrupter = CliqueInterrupter(
        cast(Any, service), ("127.0.0.1", 1), cast(GlooSockets, None), known_key="known"
    )
    now_s = time.monotonic()
    assert interrupter.interrupt(now_s) == 0
    for number in range(1, 6):
        assert interrupter.interrupt(now_s + PUBLISH_DELAY_S * (1 + number)) == 0
    assert service.calls == 1, "another call would hang, too"
    service.is_over.set()
