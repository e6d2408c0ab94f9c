"""The leader's coordination services: real processes, restarted after a failed start."""

import asyncio
from pathlib import Path

import pytest

from resilient_jax.cluster import coordination_services
from resilient_jax.cluster.coordination_services import CoordinationServices
from resilient_jax.events import EventKind
from resilient_jax.ids import WorldId
from resilient_jax.telemetry.event_log import EventLog, read_events

DEADLINE_S = 120.0


def test_a_service_that_fails_to_start_is_reported_and_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events.jsonl", "host-0")
    monkeypatch.setattr(coordination_services, "START_RETRY_INTERVAL_S", 0.05)
    monkeypatch.setattr(coordination_services, "SERVICE_MODULE", "resilient_jax.no_such_module")

    async def wait(services: CoordinationServices, kind: EventKind) -> None:
        while kind not in {event.kind for event in read_events(tmp_path / "events.jsonl")}:
            services.start(WorldId(1), 2, 4)
            await asyncio.sleep(0.05)

    async def main() -> None:
        services = CoordinationServices("127.0.0.1", log, lambda: None)
        async with asyncio.timeout(DEADLINE_S):
            await wait(services, EventKind.COORDINATION_SERVICE_START_FAILED)
            assert services.running == ()
            monkeypatch.setattr(
                coordination_services, "SERVICE_MODULE", "resilient_jax.jax_runtime.coordination_service"
            )
            await wait(services, EventKind.COORDINATION_SERVICE_STARTED)
            (status,) = services.running
            assert (status.world, status.num_processes) == (1, 2)
            await services.close()

    asyncio.run(main())
    log.close()


def test_services_can_be_closed_although_one_failed_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordination_services, "SERVICE_MODULE", "resilient_jax.no_such_module")

    async def main() -> None:
        services = CoordinationServices("127.0.0.1", EventLog(None, "host-0"), lambda: None)
        services.start_standby()
        assert services._standby is not None
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait((services._standby,))
            await services.close()

    asyncio.run(main())
