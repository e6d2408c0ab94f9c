"""Processes that each are one host of a pipeline, and steps of several of them together."""

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.jax_runtime.worker_environment import set_device_count
from resilient_jax.pipeline_schedule.rerouting import reroute
from resilient_jax.pipeline_schedule.routes import Routes, find_holders, make_routes
from resilient_jax.pipeline_schedule.tasks import PipelineSchedule, Task
from tests.support.forge import Forge
from tests.support.patience import patience

WORKER = "tests.process.pipeline.pipeline_worker"
WAIT_S = patience(12)


def make_forge(cache_dir: Path) -> Forge:
    """Return what all hosts of a file are forked from; `cache_dir` is for compiled programs."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": set_device_count(os.environ.get("XLA_FLAGS", ""), 2),
        "JAX_COMPILATION_CACHE_DIR": str(cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    return Forge(WORKER, environment={**os.environ, **environment})


class PipelineHost:
    """A process that is one host: a forked `pipeline_worker.py`."""

    def __init__(self, name: str, forge: Forge) -> None:
        self.name = HostName(name)
        self.forge = forge
        self._process = forge.start(f"{WORKER}:main", name)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.wait(WAIT_S)

    def meet(self, blocks: int) -> None:
        """Wait until it is ready, and check that it has cut the model into so many blocks."""
        ready = self.answer()
        assert ready["blocks"] == blocks
        self.units: list[list[int]] = ready["units"]

    def tell(self, do: str, **words: object) -> None:
        """Give an order without waiting for its answer."""
        self._orders.write(json.dumps({"do": do, **words}).encode() + b"\n")
        self._orders.flush()

    def answer(self) -> dict:
        """Return the next answer; that of a host that has died is that."""
        line = self._answers.readline()
        if not line:
            self._process.wait(WAIT_S)
            return {"died": True}
        return json.loads(line)

    def end(self) -> None:
        """End the process."""
        self.kill()
        for pipe in (self._orders, self._answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class Pipeline:
    """Hosts that train together.

    Attributes:
        holders: of each block.
        routes: of every step.
    """

    def __init__(
        self,
        hosts: Sequence[PipelineHost],
        teams: Sequence[Sequence[tuple[str, int]]],
        quotas: Sequence[int],
        **config: object,
    ) -> None:
        named = [[(HostName(host), count) for host, count in team] for team in teams]
        self.routes: Routes = make_routes(named, quotas)
        self.holders = find_holders(named)
        names = {host for route in self.routes for host in (hop.host for hop in route.hops)}
        names |= frozenset().union(*self.holders)
        self.hosts = [host for host in hosts if host.name in names]
        self.generation = 0
        settings = {
            "num_microbatches": sum(quotas),
            "schedule": "zero_bubble",
            "wait_timeout_s": WAIT_S,
            **config,
        }
        self.schedule = PipelineSchedule(str(settings["schedule"]))
        self.settings = settings
        self.addresses = {
            host.name: found["address"] for host, found in self.ask(self.hosts, "start", **settings).items()
        }
        self.begin_generation()
        self.ask(self.hosts, "init", holders=[sorted(found) for found in self.holders])

    def ask(self, asked: Sequence[PipelineHost], do: str, **words: object) -> dict[PipelineHost, dict]:
        """Return the answers of hosts to an order that all get at once."""
        for host in asked:
            host.tell(do, **words)
        return {host: host.answer() for host in asked}

    def begin_generation(self) -> None:
        """Have the living hosts begin a generation."""
        self.hosts = [host for host in self.hosts if not host.is_dead]
        self.generation += 1
        names = sorted(host.name for host in self.hosts)
        found = self.ask(
            self.hosts,
            "begin",
            number=self.generation,
            hosts=names,
            holders=[sorted(found) for found in self.holders],
            addresses={name: self.addresses[name] for name in names},
        )
        assert set(map(str, found.values())) == {"{}"}, found

    def run(self, die_before: Task | None = None) -> dict[PipelineHost, dict]:
        """Run the tasks of a step."""
        return self.ask(
            self.hosts,
            "run",
            routes=msgspec.to_builtins(self.routes),
            die_before=msgspec.to_builtins(die_before),
        )

    def finish(self, faults: Mapping[str, str] | None = None) -> dict[PipelineHost, dict]:
        """Sum up and update; hosts with a fault die, or are interrupted, between the table and the update."""
        for host in self.hosts:
            host.tell("finish", fault=(faults or {}).get(host.name))
        return {host: host.answer() for host in self.hosts}

    def step(self) -> dict[int, str]:
        """Run an undisturbed step; return the digest of each block's weights."""
        for host, found in self.run().items():
            assert "ran" in found, (host.name, found)
        return self.commit()

    def evaluate(self, routes: Routes, die_before: tuple[str, int] | None = None) -> dict[PipelineHost, dict]:
        """Run an evaluation."""
        hosts = sorted(host.name for host in self.hosts)
        words = {"routes": msgspec.to_builtins(routes), "hosts": hosts, "die_before": die_before}
        return self.ask(self.hosts, "evaluate", **words)

    def commit(self) -> dict[int, str]:
        """Finish a step whose tasks are done; return the digest of each block's weights."""
        seen = set()
        for host, found in self.finish().items():
            assert "norm" in found, (host.name, found)
            seen.add((found["norm"], found["loss"]))
        assert len(seen) == 1
        return self.read_digests()

    def kill(self, name: str) -> None:
        """Kill a host between two orders."""
        victim = next(host for host in self.hosts if host.name == name)
        victim.kill()

    def recover(self) -> int:
        """Begin a generation without dead hosts; return the step that the others go on with."""
        self.begin_generation()
        found = self.ask(self.hosts, "agree")
        steps = {str(one) for one in found.values()}
        assert len(steps) == 1, found
        return next(iter(found.values()))["step"]

    def cut_anew(self, teams: Sequence[Sequence[tuple[str, int]]], quotas: Sequence[int]) -> int:
        """Begin a generation of living hosts with other replicas, and move units; return how many were moved."""
        named = [[(HostName(host), count) for host, count in team] for team in teams]
        self.routes, self.holders = make_routes(named, quotas), find_holders(named)
        self.recover()
        wanted = self.list_wanted(self.hosts, teams)
        found = self.ask(self.hosts, "move", wanted=wanted)
        assert all("moved" in one for one in found.values()), found
        return sum(one["moved"] for one in found.values())

    def list_wanted(
        self, hosts: Sequence[PipelineHost], teams: Sequence[Sequence[tuple[str, int]]]
    ) -> dict[str, list[int]]:
        """Return the units that each host is to hold as replicas of these hosts and blocks."""
        holders = find_holders([[(HostName(host), count) for host, count in team] for team in teams])
        return {
            host.name: [
                number
                for number, blocks in enumerate(host.units)
                if any(host.name in holders[block] for block in blocks)
            ]
            for host in hosts
        }

    def begin_copies(self, joiner: PipelineHost, teams: Sequence[Sequence[tuple[str, int]]]) -> None:
        """Have a host that is none of these ask for what all are to hold when it has joined; it waits for that."""
        members = list(self.hosts)
        self.serve_copies()
        self.addresses[joiner.name] = self.ask([joiner], "start", **self.settings)[joiner]["address"]
        joiner.tell(
            "ask",
            number=self.generation,
            addresses={host.name: self.addresses[host.name] for host in members},
            wanted=self.list_wanted([*members, joiner], teams),
        )

    def serve_copies(self) -> None:
        """Have these hosts make copies for whoever asks."""
        holders = [
            sorted({host for block in blocks for host in self.holders[block]})
            for blocks in self.hosts[0].units
        ]
        words = {"hosts": [host.name for host in self.hosts], "holders": holders}
        self.ask(self.hosts, "serve", number=self.generation, **words)

    def prepare_change(self, teams: Sequence[Sequence[tuple[str, int]]], timeout_s: float = WAIT_S) -> None:
        """Have the first host ask for what all are to hold as these replicas, which some may be none of."""
        self.serve_copies()
        wanted = self.list_wanted(self.hosts, teams)
        (found,) = self.ask(
            self.hosts[:1], "prepare", number=self.generation + 1, wanted=wanted, timeout_s=timeout_s
        ).values()
        assert found == {}, found

    def find_change(self) -> int | None:
        """Return after how many steps all hosts let the change come, the same on all; None: not yet."""
        found = {one["changed_after"] for one in self.ask(self.hosts, "has_copies").values()}
        assert len(found) == 1, found
        return found.pop()

    def take_copies(self, joiners: Sequence[PipelineHost], step: int) -> dict[str, list[int]]:
        """Have hosts that join, and all others, take what they have copies of; return the units, by host."""
        self.hosts += joiners
        found = self.ask(self.hosts, "take_copies", step=step)
        return {host.name: one["taken"] for host, one in found.items()}

    def count_done(self) -> dict[str, int]:
        """Return how many tasks of the step each living host has finished."""
        self.hosts = [host for host in self.hosts if not host.is_dead]
        return {host.name: one["done"] for host, one in self.ask(self.hosts, "count_done").items()}

    def leave_world(self) -> None:
        """Have the living hosts keep in host memory what they have, and get other devices."""
        found = self.ask(self.hosts, "leave_world")
        assert set(map(str, found.values())) == {"{}"}, found

    def resume(self) -> int:
        """Go on with the tasks of the step; return how many were run."""
        found = self.ask(self.hosts, "resume")
        assert all("ran" in one for one in found.values()), found
        return sum(one["ran"] for one in found.values())

    def reroute(self) -> None:
        """Have routes without dead hosts for the next steps."""
        living = {host.name for host in self.hosts}
        dead = frozenset().union(*self.holders) - living
        found = reroute(self.routes, (), self.holders, dead, schedule=self.schedule)
        self.routes = found.routes

    def read_digests(self) -> dict[int, str]:
        """Return the digest of each block's weights, after a check that all its holders have the same."""
        merged: dict[int, str] = {}
        answers = self.ask(self.hosts, "digest")
        assert len({found["step"] for found in answers.values()}) == 1
        for host, found in answers.items():
            for block, digest in found["digests"].items():
                if host.name in self.holders[int(block)]:
                    assert merged.setdefault(int(block), digest) == digest, f"block {block} on {host.name}"
        assert sorted(merged) == list(range(len(self.holders)))
        return merged
