"""What hosts compare of a compute function, before it has computed anything."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from jax.extend import core
from jax.sharding import AbstractMesh, Mesh

from resilient_jax.program_analysis.program_digest import ProgramDescription, describe_program
from resilient_jax.step.batch_source import BatchSource
from resilient_jax.step.data_sample import DigestFunction, digest_data
from resilient_jax.step.microbatch_accumulator import ComputeFunction, Microbatch
from resilient_jax.step.replicas import Replica
from resilient_jax.step.traced_call import MicrobatchCall, describe_call, digest_call

logger = logging.getLogger(__name__)
MICROBATCH: Final = "a microbatch"
UPDATE: Final = "the update"
COMPARED_PROGRAMS: Final = (MICROBATCH, UPDATE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchProgram:
    """A compute function that calls one program, which is jitted: `program(*shared, batch, *ids, **options)`.

    Attributes:
        shared: what all microbatches take: arrays of this host, which are copied to a replica's mesh once.
        make_ids: returns what tells microbatches apart, by step and index.
        describe_example: returns the abstract arrays of a microbatch.
        choose_options: returns the static arguments, by the mesh of a replica.
        update: the program that takes the sum; None: it is not known.
    """

    program: Any
    shared: tuple[Any, ...]
    make_ids: Callable[[int, int], tuple[Any, ...]]
    describe_example: Callable[[], Any]
    choose_options: Callable[[AbstractMesh], Mapping[str, Any]]
    update: ProgramDescription | None = None
    _shared_by_mesh: dict[Mesh, tuple[Any, ...]] = dataclasses.field(default_factory=dict, init=False)

    def __call__(self, microbatch: Microbatch) -> Any:  # noqa: ANN401 - a tree
        """Compute a microbatch."""
        program, *arguments = self.bind(microbatch)
        return program(*arguments)

    def bind(self, microbatch: Microbatch) -> tuple[Callable[..., Any], *tuple[Any, ...]]:
        """Return the program and its arguments for a microbatch."""
        replica = microbatch.replica
        batch = replica.place_batch(microbatch.batch)
        options = self.choose_options(replica.mesh.abstract_mesh)
        arguments = self._list_arguments(replica, batch, microbatch.step, microbatch.index)
        return functools.partial(self.program, **options), *arguments

    def trace(self, replica: Replica) -> core.ClosedJaxpr:
        """Return the program's jaxpr for a replica, traced as the call will trace it."""
        arguments = self._list_arguments(replica, replica.describe_batch(self.describe_example()), 0, 0)
        return self.program.trace(*arguments, **self.choose_options(replica.mesh.abstract_mesh)).jaxpr

    def _list_arguments(self, replica: Replica, batch: Any, step: int, index: int) -> tuple[Any, ...]:  # noqa: ANN401 - a tree
        known = self._shared_by_mesh
        if replica.mesh not in known:  # two threads have two replicas
            known[replica.mesh] = replica.to_replica(self.shared)
        return *known[replica.mesh], batch, *self.make_ids(step, index)


def describe_programs(
    compute_fn: ComputeFunction[Any], data: BatchSource | None, replica: Replica | None
) -> Mapping[str, ProgramDescription]:
    """Return what is known of an accumulation, by `COMPARED_PROGRAMS`.

    Args:
        compute_fn: a `MicrobatchProgram`, or any function, which is called to trace it: for the first microbatch of
            the first step, whatever the step, since hosts may describe it in different steps.
        data: where its microbatches come from; None: it reads them itself.
        replica: the devices to trace it for; None: no program is known.
    """
    if replica is None:
        return {}
    if not isinstance(compute_fn, MicrobatchProgram):
        programs = {MICROBATCH: describe_call(_bind_call(compute_fn, data, replica))}
    else:
        programs = {MICROBATCH: _describe_traced(compute_fn, replica), UPDATE: compute_fn.update}
    return {name: program for name, program in programs.items() if program is not None}


def choose_digest_function(
    compute_fn: ComputeFunction[Any], data: BatchSource | None, replica: Replica | None, num_microbatches: int
) -> DigestFunction | None:
    """Return what digests a microbatch, as `data` has it or as the compute function reads it; None: nothing does."""
    if data is not None:
        return functools.partial(digest_data, data)
    # A replica's hosts read different rows.
    if isinstance(compute_fn, MicrobatchProgram) or replica is None or not replica.is_on_one_host:
        return None
    return functools.partial(
        digest_call, _bind_call(compute_fn, None, replica), num_microbatches=num_microbatches
    )


def _bind_call(
    compute_fn: ComputeFunction[Any], data: BatchSource | None, replica: Replica
) -> MicrobatchCall:
    """Return a function of step and index that reads and computes a microbatch on a replica."""

    @functools.cache  # read once, however often it is called
    def read(step: int, index: int) -> Any:  # noqa: ANN401 - a tree
        return data.get(step, index, replica.data_shard) if data is not None else None

    def call(step: int, index: int) -> Any:  # noqa: ANN401 - a tree
        batch = read(step, index)
        return compute_fn(Microbatch(step=step, index=index, replica=replica, batch=batch))

    return call


def _describe_traced(program: MicrobatchProgram, replica: Replica) -> ProgramDescription | None:
    try:
        return describe_program(program.trace(replica))
    # The call traces it, too, and raises the error where it always came from.
    except Exception:
        logger.debug("a microbatch's program could not be traced for comparison", exc_info=True)
        return None
