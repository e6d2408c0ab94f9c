"""A worker is let in only with the script that the job's other hosts run."""

import asyncio
import contextlib

import pytest

from resilient_jax.cluster.script_admission import ScriptAdmission
from resilient_jax.cluster.stored_records import ENCODER
from resilient_jax.config import JobConfig
from resilient_jax.errors import ExitCode, ScriptRefused
from resilient_jax.ids import HostName, JobName
from resilient_jax.protocol.records import HostStatus, Versions
from resilient_jax.protocol.store_keys import make_host_key
from resilient_jax.store.memory import MemoryStore
from tests.support.patience import patience

JOB = JobName("job")
SCRIPT = {"arguments": "['--lr', '0.1']", "script": "aa", "module model": "bb", "version of flax": "0.12"}


class Host:
    """A host with an agent, whose status is in the store while it lives."""

    def __init__(self, store: MemoryStore, name: str, config: JobConfig | None = None) -> None:
        self.store, self.name, self.agent_id = store, HostName(name), f"agent of {name}"
        self.admission = ScriptAdmission(store, JOB, self.name, self.agent_id, config or JobConfig())

    async def publish(self) -> None:
        versions = Versions(python="3", resilient_jax="1", jax="1", jaxlib="1")
        status = HostStatus(
            host=self.name,
            agent_id=self.agent_id,
            agent_pid=1,
            address="here",
            versions=versions,
            script=self.admission.digest,
        )
        await self.store.put(make_host_key(JOB, self.name), ENCODER.encode(status))

    async def join(self, **changes: str) -> None:
        await self.publish()
        await self.admission.admit({**SCRIPT, **changes})
        await self.publish()

    async def die(self) -> None:
        await self.store.delete(make_host_key(JOB, self.name))


@contextlib.asynccontextmanager
async def two_hosts():
    async with MemoryStore() as store:
        hosts = [Host(store, name) for name in "ab"]
        for host in hosts:
            await host.join()
        yield store, *hosts


def run(main) -> None:
    async def bounded():
        async with asyncio.timeout(patience(6)):
            await main()

    asyncio.run(bounded())


@pytest.mark.parametrize(
    ("item", "value"),
    [("arguments", "['--lr', '0.2']"), ("script", "cc"), ("module model", "dd"), ("version of flax", "0.11")],
)
def test_another_script_is_refused_with_both_values(item: str, value: str) -> None:
    async def main():
        async with two_hosts() as (store, _, _):
            with pytest.raises(ScriptRefused) as refused:
                await Host(store, "c").join(**{item: value})
        assert f"{item}: found {value} on c, expected {SCRIPT[item]} as on a" in str(refused.value)
        assert refused.value.exit_code == ExitCode.SCRIPT_DIFFERS

    run(main)


def test_another_configuration_is_refused_but_each_host_has_a_disk_of_its_own() -> None:
    async def main():
        async with two_hosts() as (store, _, _):
            await Host(store, "c", JobConfig(compile_cache_mib=64)).join()
            with pytest.raises(
                ScriptRefused, match="configuration min_hosts: found 2 on d, expected 1 as on a"
            ):
                await Host(store, "d", JobConfig(min_hosts=2)).join()

    run(main)


def test_what_only_one_host_has_imported_says_nothing() -> None:
    async def main():
        async with two_hosts() as (store, _, _):
            await Host(store, "c").join(**{"module debugger": "ee"})

    run(main)


def test_the_script_stands_as_long_as_a_host_with_it_lives() -> None:
    async def main():
        async with two_hosts() as (store, a, b):
            await a.die()  # the host that has described it
            with pytest.raises(ScriptRefused):
                await Host(store, "c").join(script="mended")
            await b.die()
            d = Host(store, "d")
            await d.join(script="mended")
            with pytest.raises(ScriptRefused, match="script: found aa on e, expected mended as on d"):
                await Host(store, "e").join()

    run(main)


def test_a_host_alone_may_start_its_worker_again_with_a_mended_script() -> None:
    async def main():
        async with MemoryStore() as store:
            host = Host(store, "a")
            await host.join()
            await host.join(script="mended")

    run(main)


def test_of_hosts_that_come_at_once_one_describes_the_script() -> None:
    async def main():
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
    async def main():
        async with MemoryStore() as store:
            first, other = Host(store, "a"), Host(store, "b")
            await first.publish()
            await first.admission.admit({f"module {index}": "x" for index in range(9)})
            with pytest.raises(ScriptRefused, match=r"module 3: .*; and 5 more"):
                await other.admission.admit({f"module {index}": "y" for index in range(9)})

    run(main)
