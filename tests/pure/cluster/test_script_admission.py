"""The hosts of a job agree on its program, and a worker is let in only with the script that the others run."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.kept_program import SCRIPT_MODULE
from resilient_jax.cluster.script_admission import ScriptAdmission
from resilient_jax.cluster.stored_records import ENCODER
from resilient_jax.config import JobConfig
from resilient_jax.errors import ExitCode, LogUnwritable, ScriptRefused
from resilient_jax.ids import HostName
from resilient_jax.protocol.host_status import AgentStatus, HostStatus
from resilient_jax.protocol.store_keys import make_host_key
from resilient_jax.store.memory import MemoryStore
from tests.support.agent_parts import JOB, make_agent_settings
from tests.support.patience import patience

SCRIPT = {"arguments": "['--lr', '0.1']", "script": "aa", "module model": "bb", "version of flax": "0.12"}
SETTINGS = make_agent_settings(Path("train.py"), JobConfig())


class Host:
    """A host with an agent, whose status is in the store while it lives."""

    def __init__(
        self,
        store: MemoryStore,
        name: str,
        config: JobConfig | None = None,
        agent_id: str = "",
        settings: AgentSettings = SETTINGS,
    ) -> None:
        self.store, self.name, self.agent_id = store, HostName(name), agent_id or f"agent of {name}"
        self.settings = dataclasses.replace(settings, host=self.name, config=config or JobConfig())
        self.admission = ScriptAdmission(store, self.settings, self.agent_id)

    async def publish(self) -> None:
        status = HostStatus(
            host=self.name,
            agent=AgentStatus(id=self.agent_id, pid=1, address="here", versions=self.settings.versions),
            program=self.admission.program,
        )
        await self.store.put(make_host_key(JOB, self.name), ENCODER.encode(status))

    async def register(self) -> str:
        """Register as an agent does; return the id of the program."""
        await self.publish()
        await self.admission.settle()
        await self.publish()
        return self.admission.program

    async def join(self, **changes: str) -> None:
        await self.register()
        await self.admission.admit({**SCRIPT, **changes})

    async def die(self) -> None:
        await self.store.delete(make_host_key(JOB, self.name))


@contextlib.asynccontextmanager
async def two_hosts() -> AsyncIterator[tuple[MemoryStore, Host, Host]]:
    async with MemoryStore() as store:
        hosts = [Host(store, name) for name in "ab"]
        for host in hosts:
            await host.join()
        first, second = hosts
        yield store, first, second


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(patience(6)):
            await main()

    asyncio.run(bounded())


@pytest.mark.parametrize(
    ("item", "value"),
    [("arguments", "['--lr', '0.2']"), ("script", "cc"), ("module model", "dd"), ("version of flax", "0.11")],
)
def test_another_script_is_refused_with_both_values(item: str, value: str) -> None:
    async def main() -> None:
        async with two_hosts() as (store, _, _):
            with pytest.raises(ScriptRefused) as refused:
                await Host(store, "c").join(**{item: value})
        assert f"{item}: found {value} on c, expected {SCRIPT[item]} as on a" in str(refused.value)
        assert refused.value.exit_code == ExitCode.SCRIPT_DIFFERS

    run(main)


def test_another_configuration_is_refused_but_each_host_has_a_disk_of_its_own() -> None:
    async def main() -> None:
        async with two_hosts() as (store, _, _):
            await Host(store, "c", JobConfig(compile_cache_mib=64)).join()
            with pytest.raises(
                ScriptRefused, match="configuration min_hosts: found 2 on d, expected 1 as on a"
            ):
                await Host(store, "d", JobConfig(min_hosts=2)).join()

    run(main)


def test_what_only_one_host_has_imported_says_nothing() -> None:
    async def main() -> None:
        async with two_hosts() as (store, _, _):
            await Host(store, "c").join(**{"module debugger": "ee"})

    run(main)


def test_the_script_stands_as_long_as_a_host_with_it_lives() -> None:
    async def main() -> None:
        async with two_hosts() as (store, a, b):
            await a.die()  # the host that has described it
            c = Host(store, "c")
            with pytest.raises(ScriptRefused):
                await c.join(script="mended")
            await c.die()
            await b.die()
            d = Host(store, "d")
            await d.join(script="mended")
            with pytest.raises(ScriptRefused, match="script: found aa on e, expected mended as on d"):
                await Host(store, "e").join()

    run(main)


@pytest.mark.parametrize("hosts", [1, 3])
def test_a_worker_that_is_started_again_runs_what_the_one_before_did(hosts: int) -> None:
    async def main() -> None:
        async with MemoryStore() as store:
            found = [Host(store, f"host-{index}") for index in range(hosts)]
            for host in found:
                await host.join()
            for host in found:
                await host.join()
                with pytest.raises(ScriptRefused, match=r"version of flax: found 0\.13 .* expected 0\.12"):
                    await host.join(**{"version of flax": "0.13"})

    run(main)


def test_hosts_that_register_at_once_have_one_program_and_another_agent_joins_it() -> None:
    async def main() -> None:
        async with MemoryStore() as store:
            hosts = [Host(store, f"host-{index}") for index in range(6)]
            programs = set(await asyncio.gather(*(host.register() for host in hosts)))
            assert len(programs) == 1
            await hosts[0].die()  # the agent that may have begun it
            assert await Host(store, "host-0", agent_id="a later one").register() in programs

    run(main)


@pytest.mark.parametrize("is_launched", [False, True])
def test_a_host_that_comes_back_alone_begins_another_program_unless_launch_still_runs(
    is_launched: bool,
) -> None:
    settings = dataclasses.replace(SETTINGS, is_launched=is_launched)

    async def main() -> None:
        async with MemoryStore() as store:
            first = Host(store, "a", settings=settings)
            await first.join()
            await first.die()
            second = Host(store, "a", agent_id="a later one", settings=settings)
            goes_on = await second.register() == first.admission.program
            assert goes_on is is_launched
            # The record of a program that others run stays theirs, also after a registration that was lost.
            assert await second.register() == second.admission.program

    run(main)


def test_the_script_is_kept_for_the_program_and_those_before_are_removed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("rate = 0.1\n")
    settings = dataclasses.replace(make_agent_settings(script, JobConfig()), run_directory=tmp_path / "run")

    async def main() -> None:
        async with MemoryStore() as store:
            kept = []
            for agent_id in ("first", "second"):
                host = Host(store, "a", agent_id=agent_id, settings=settings)
                await host.register()
                assert host.admission.kept is not None
                kept.append(host.admission.kept)
                script.write_text("rate = 0.2\n")
                copy = kept[-1].keep(SCRIPT_MODULE, str(script))
                expected = b"rate = 0.1\n" if agent_id == "first" else b"rate = 0.2\n"
                assert kept[-1].read(copy) == expected
                await host.die()
            assert not kept[0].folder.exists()
            assert kept[1].folder.stat().st_mode & 0o777 == 0o700

    run(main)


def test_a_script_that_cannot_be_kept_ends_the_agent(tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, run_directory=tmp_path, command=(str(tmp_path / "gone.py"),))

    async def main() -> None:
        async with MemoryStore() as store:
            with pytest.raises(LogUnwritable, match=r"cannot keep a copy of .*gone\.py in the run folder"):
                await Host(store, "a", settings=settings).register()

    run(main)


def test_of_hosts_that_come_at_once_one_describes_the_script() -> None:
    async def main() -> None:
        async with MemoryStore() as store:
            hosts = [Host(store, f"host-{index}") for index in range(6)]
            found = await asyncio.gather(
                *(host.join(script=str(index % 2)) for index, host in enumerate(hosts)),
                return_exceptions=True,
            )
            refused = {index % 2 for index, error in enumerate(found) if isinstance(error, ScriptRefused)}
            admitted = {index % 2 for index, error in enumerate(found) if error is None}
            assert len(refused) == len(admitted) == 1
            assert refused != admitted

    run(main)


def test_an_error_names_some_differences_and_counts_the_others() -> None:
    async def main() -> None:
        async with MemoryStore() as store:
            first, other = Host(store, "a"), Host(store, "b")
            await first.register()
            await first.admission.admit({f"module {index}": "x" for index in range(9)})
            await other.register()
            with pytest.raises(ScriptRefused, match=r"module 3: .*; and 5 more"):
                await other.admission.admit({f"module {index}": "y" for index in range(9)})

    run(main)
