"""What the user's train function gets: the live hosts, their devices, the steps, the state and the reductions."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from resilient_jax.argument_checks import describe_value, find_refused_call
from resilient_jax.compile.ahead_of_time import AheadOfTimeCompiler
from resilient_jax.data.microbatch_rows import check_integers
from resilient_jax.errors import CallerError, StateError
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName, ProcessIndex
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.jax_runtime.live_processes import list_spare_devices
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.replay import ReplayOrder
from resilient_jax.state.flat_state import ShardingRule, is_in_shards
from resilient_jax.step.accumulation_call import AccumulationCall
from resilient_jax.step.assignment import (
    AccumulationOptions,
    AccumulationSpec,
    ReplicaShape,
    count_devices_by_host,
)
from resilient_jax.step.loss_gradient import LossFunctions
from resilient_jax.step.reducer import ComputeFunction, Reducer
from resilient_jax.step.replicas import is_on_replicas
from resilient_jax.step.value_and_grad import ValueAndGrad, check_loss_function, open_batches
from resilient_jax.worker.audit_response import AuditResponse
from resilient_jax.worker.generation_info import AxisSizes, GenerationInfo, make_mesh
from resilient_jax.worker.mail_opening import MailOpener, make_local_opener
from resilient_jax.worker.mail_sums import MailSums
from resilient_jax.worker.session import Session, TrainingControl
from resilient_jax.worker.step_results import REDUCED
from resilient_jax.worker.step_services import StepServices
from resilient_jax.worker.training_control import GenerationEnded

Tree = TypeVar("Tree")
DEFAULT_OPTIONS = AccumulationOptions()
ONE_REPLICA_PER_HOST = ReplicaShape()


class World:
    """One generation's members and devices, as the user's train function sees them.

    A world is valid until the train function is unwound; the next generation brings a new one.

    Attributes:
        generation: the agreed membership's number; the number only grows.
        hosts: names of the live hosts, in order of their process index.
        host: this host's name.
        host_index: this host's index in `hosts`, dense from 0: host 0 is the one that prints and saves. JAX's functions
            count live hosts only, too: the index is `jax.process_index()`.
        local_devices: the devices of this host.
        spare_devices: the devices of hosts that may join in place, in the order of their joining; programs can be
            compiled for them, but not run.
        reason: why this generation was formed.
        change: how this generation was formed: "shrink" or "grow" (in place), or "reform".
        state_loss: what was lost, and the step of the checkpoint that is on storage, if this generation must resume
            from that checkpoint because no host's memory has the state any more; else None.
        events: what this worker recorded on its way into this generation, oldest first.
        step_services: services for steps that are made in another way than by `accumulate_microbatches`.
        trusted_step: states of more than so many steps may be wrong, because a host has computed wrongly; None: none.
        is_rehearsal: whether this worker, which is about to join, only runs a step for practice while the others train,
            so that all programs are loaded when it does join. The state is the initial one, nothing is counted,
            collectives give zeros, and the train function is unwound at its first commit.
        is_repetition: whether this worker only finishes a step that others have committed, with what they found:
            nothing is computed but the update, and the train function is unwound at its commit.
        audits: audits of the hosts' computations, such as `audits.verified_step`; None without.
        replay: what is to be computed again, if `resilient-jax replay` started this script; else None. A loop that
            loads its own checkpoints then loads one of at most `replay.step` steps, and writes nothing.
    """

    def __init__(
        self,
        info: GenerationInfo,
        session: Session,
        control: TrainingControl,
        reducer: Reducer,
        compiler: AheadOfTimeCompiler | None = None,
        mail: MailOpener | None = None,
        replay: ReplayOrder | None = None,
        audits: AuditResponse | None = None,
    ) -> None:
        self.generation = info.number
        self.hosts = info.hosts
        self.host = info.host
        self.host_index = int(info.process_index)
        self.local_devices: list[Device] = jax.local_devices()
        self.spare_devices: list[Device] = list_spare_devices()
        self.change = info.change
        self.reason = info.reason
        self.state_loss = info.state_loss
        self.trusted_step = info.trusted_step
        self.events = info.events
        self.is_rehearsal = session.is_rehearsal
        self.is_repetition = session.repeated is not None
        self.audits = audits
        self.replay = replay
        self._info = info
        self._session = session
        self._loss_functions = LossFunctions()
        self._control = control
        self._reducer = reducer
        mail = mail or make_local_opener()
        stage_hosts, speeds = info.stage_hosts or info.hosts, dict(info.layer_speeds)
        self.step_services = StepServices(
            info.host,
            session,
            mail,
            control,
            reducer.watch,
            speeds,
            stage_hosts,
            info.is_joining,
            info.earlier_stage_hosts,
            info.plan_axes,
            info.plan_constants,
            reducer.throttle,
            info.next_failure_s,
            None if info.has_service else MailSums(self.local_devices, info.process_index),
            compiler,
        )

    # Devices and meshes.

    @property
    def devices(self) -> list[Device]:
        """The devices of the live hosts, as `jax.devices()` lists them."""
        return jax.devices()

    def host_of_device(self, device: Device) -> HostName:
        """Return the host that a device of this world belongs to."""
        return self._info.host_of_device(device)

    def mesh(self, axes: AxisSizes | ReplicaShape) -> Mesh:
        """Return a mesh over the devices of all live hosts, or of all replicas: the axis "replica", then those of each.

        A state that is sharded over a replica's axes is in shards on the hosts of each replica. Hosts that are too few
        for one more have nothing of it.

        Args:
            axes: one axis name; or names with sizes, of which one may be -1 (what is left); or the shape of replicas.

        Raises:
            CallerError: the sizes do not multiply to the number of live devices, or hosts are too few for one replica.
        """
        if isinstance(axes, ReplicaShape):
            return self._reducer.make_replica_mesh(axes)
        if self.is_rehearsal:
            raise GenerationEnded  # programs on it would wait for the others
        return make_mesh(self.devices, axes, f"the {len(self.hosts)} live hosts")

    def local_mesh(self, axes: AxisSizes = "data") -> Mesh:
        """Return a mesh over this host's devices alone: programs on it survive every change of membership.

        It has as many devices on every host: the first ones, where other hosts have fewer. Then all hosts update their
        copies of a state by the same program, and get the same bits.
        """
        width = min(count_devices_by_host(self.devices))
        return make_mesh(self.local_devices[:width], axes, f"host {self.host}")

    # Steps and state.

    @property
    def is_fresh(self) -> bool:
        """Whether nothing is committed yet, so that `restore_or_init` makes the state, not just its shapes."""
        return self._session.is_fresh

    def steps(self, num_steps: int, *, num_commits: int | None = None) -> Iterator[int]:
        """Yield the steps that are left, from the first that is not committed up to `num_steps`, exclusive.

        Hosts join and leave between two steps: a loop that does not use this method never gains a host.

        Args:
            num_steps: where the loop ends, in steps since the beginning of the job.
            num_commits: how many of them are committed, for the progress line, where the last ones are not: they only
                evaluate. None: all.

        Raises:
            StateError: the job must resume from a checkpoint, and `resume_at` has not been called.
            CallerError: `num_steps` is not an integer.
        """
        check_integers(num_steps=num_steps)
        return self._session.steps(self, num_steps, num_steps if num_commits is None else num_commits)

    def resume_at(self, step: int) -> None:
        """Count steps from here, as long as nothing is committed: for a state that comes from storage.

        Every host must call it with the same step.

        Raises:
            StateError: the step is not an integer, or states of so many steps may be wrong.
        """
        if self.trusted_step is not None and step > self.trusted_step:
            raise StateError(
                f"resume_at: found a state of {step} steps, expected one of at most {self.trusted_step}: a host has "
                "computed wrongly, and may have touched newer ones. Load an older checkpoint"
            )
        self._session.resume_at(step)

    def restore_or_init(self, init_fn: Callable[[], Tree], sharding: ShardingRule | None = None) -> Tree:
        """Return the state that was committed last, else `init_fn()`; each leaf is of the type that it was.

        A JAX array comes back as one, weakly typed if it was; NumPy's arrays and scalars, Python's numbers and strings
        come back as they were, with 64 bits.

        Args:
            init_fn: makes the initial state, a pytree of arrays, numbers and strings; must be deterministic, since
                every host calls it. Also called abstractly, for the tree's shape: it must be traceable, as by
                `jax.eval_shape`.
            sharding: the sharding of the JAX arrays, and of what `init_fn` makes in host memory, which become JAX
                arrays as by `jax.device_put`; None keeps the sharding that they have, or takes this host's first
                device. Required for leaves on a mesh of several hosts, because that mesh has changed.

        Raises:
            CallerError: `init_fn` is no function without parameters.
            StateError: the committed state does not fit `init_fn`, or cannot be placed; or `init_fn` cannot be traced,
                or makes a leaf that could not come back as it is.
        """
        if not callable(init_fn) or find_refused_call(init_fn, 0) is not None:
            raise CallerError(
                f"restore_or_init: found {describe_value(init_fn)}, expected a function without parameters that makes "
                "the state, called only where none survived: world.restore_or_init(lambda: make_state(...))"
            )
        return self._session.restore_or_init(init_fn, sharding, self._reducer.exchange)

    @property
    def is_leaving(self) -> bool:
        """Whether the job ends after this step, because all its hosts got a notice (a time limit, say): save now.

        Look in each step, after the commit: `if world.is_leaving or step % 100 == 99: save(state)`. True on all hosts
        in the same step, so a save may be collective. What is not saved within the grace of the notice is lost.
        """
        return self._control.is_leaving

    def commit(self, state: Any, **metrics: float) -> None:  # noqa: ANN401 - any pytree
        """Make `state`, after the current step, what survives a failure from here on.

        Waits until the arrays are computed, because a step that fails later was not done. JAX arrays are kept, not
        copied (NumPy's are copied): do not donate them before the next commit, except to a program that cannot fail
        because of other hosts (one on `local_mesh`), whose result is committed; call `wait_until_finished` before.

        From time to time, when the step has ended, a state that is replicated on every host is copied into the hosts'
        memory, as `snapshot` does, so that it outlives all workers. Every host must commit in the same steps.

        Args:
            state: a pytree of arrays, numbers and strings. One that is not replicated on every host survives the loss
                of a host only by `snapshot`.
            metrics: numbers for the progress line, the status and the log.

        Raises:
            StateError: called outside of `steps`, or a leaf could not come back as it is, or was donated.
        """
        self._session.commit(state, {name: float(value) for name, value in metrics.items()})

    def snapshot(self, state: Any) -> None:  # noqa: ANN401 - any pytree
        """Begin to copy the committed state into the memory of the hosts, protected by parity; return at once.

        From such a snapshot a state that is sharded over hosts is restored after a failure. A replicated state needs no
        call: it is copied after commits, until this method is called in a generation. The job's configuration says how
        often a snapshot is taken, and how many hosts may be lost; a call when none is due does nothing. Without an
        agent there is no snapshot server, and a call does nothing.

        Every host must call it after the same steps. Call `wait_until_finished` before the arrays are donated.

        Args:
            state: the state that was given to `commit`.

        Raises:
            StateError: nothing is committed in this step.
            CallerError: the snapshots do not fit in this host's memory.
        """
        self._session.snapshot(self, state)

    def wait_until_finished(self) -> None:
        """Wait until the last snapshot is copied: from then on its arrays may be donated."""
        self._session.wait_until_finished()

    # Reductions.

    def all_reduce(self, tree: Tree) -> Tree:
        """Return the sum over live hosts of each leaf, all of a dtype together.

        Device arrays give arrays of the same sharding; numpy arrays give numpy arrays, for comparing what the hosts
        have found. Every live host must call it, with the same shapes. Floats are summed exactly, so the
        bits of the result depend on what the hosts give and not on their order. A host sends 17 / 4 G (H - 1) / H for G
        bytes of float32 on H hosts: meant for small arrays, where `accumulate_microbatches` is for gradients.

        Returns when the result is computed, so that a step that continues has been reduced on this host.
        """
        leaves = jax.tree.leaves(tree)
        if any(
            isinstance(leaf, jax.Array) for leaf in leaves
        ):  # host arrays are control traffic, no part of the step
            self._session.hit_failpoint(FailPoint.BEFORE_REDUCE)
        by_mail, repeated = self.step_services.mail_sums, self._session.repeated
        if repeated is not None:
            total = jax.tree.unflatten(jax.tree.structure(tree), repeated.take_reduced(leaves))
            return jax.tree.map(
                lambda leaf, summed: (
                    jax.device_put(summed, leaf.sharding) if isinstance(leaf, jax.Array) else summed
                ),
                tree,
                total,
            )
        total = by_mail.add_up(tree) if by_mail is not None else self._reducer.all_reduce(tree)
        self._session.hit_failpoint(FailPoint.AFTER_ALL_REDUCE)
        self.raise_if_ended()
        total = jax.tree.map(
            lambda leaf, summed: summed if isinstance(leaf, jax.Array) else np.asarray(summed), tree, total
        )
        self._session.committed.keep_result(REDUCED, jax.tree.leaves(total))
        return total

    def accumulate_microbatches(
        self,
        num_microbatches: int,
        compute_fn: ComputeFunction[Tree],
        zeros: Tree,
        *,
        data: object = None,
        options: AccumulationOptions = DEFAULT_OPTIONS,
        name: str = "train",
    ) -> Tree:
        """Return the sum over all microbatches of a step, each computed once by some live host.

        When a host dies in the middle, the train function is called again and calls this again in the same step: what
        the other hosts have accumulated by then is kept, and they compute only what is missing.

        Args:
            num_microbatches: how many microbatches the step has, however many hosts are alive.
            compute_fn: returns what is to be summed of one `Microbatch`: a tree of arrays on `microbatch.replica.mesh`,
                if the replica spans hosts sharded as the zeros are, or replicated. It must be the same function of the
                committed state and `microbatch.index` on every host; to compare hosts some calls are only traced. With
                several replicas on a host it is called on a thread for each, and for one on several hosts on a thread.
            zeros: what `compute_fn` returns of nothing, on this host's devices or on `mesh(replica_shape)`; the result
                has the dtypes and shardings of its leaves. Of floats of fewer than 32 bits the sum is rounded once.
            data: where `microbatch.batch` is read from, as for `value_and_grad`; None: microbatches have no batch.
            options: how microbatches are assigned and added up.
            name: the name of the accumulation; a step may have several, in the same order on every host.

        Raises:
            CallerError: the call is outside of `steps`, or twice in a step; a number is below 1; hosts are too few for
                one replica; or `zeros` are no such arrays.
        """
        spec = AccumulationSpec(
            name=name,
            step=self._session.begin_accumulation(name),
            num_microbatches=num_microbatches,
            reduction=options.reduction,
            balance_by_speed=options.balance_by_speed,
        )
        _check_zeros(zeros)
        if num_microbatches < 1:
            raise CallerError(f"num_microbatches: found {num_microbatches}, expected at least 1")
        if (repeated := self._session.repeated) is not None:
            return self._reducer.assemble_sum(spec, zeros, options.replica_shape, repeated.take_sum(name))
        total = self._reducer.accumulate_microbatches(
            spec,
            compute_fn,
            zeros,
            data=None if data is None else open_batches(data),
            replica_shape=options.replica_shape,
        )
        whole, shards = self._reducer.summands
        call = AccumulationCall(
            devices=self.devices,
            spare_devices=self.spare_devices,
            process_index=ProcessIndex(self.host_index),
            spec=spec,
            replica_shape=options.replica_shape,
            like=whole,
            lone_microbatch=self._reducer.lone_microbatch,
            shards=shards,
        )
        if (new_shares := self._reducer.take_new_shares()) and self.host == self.hosts[0]:
            self.record_event(
                EventKind.MICROBATCHES_REBALANCED,
                step=spec.step,
                name=name,
                shares=_describe_shares(self.hosts, new_shares),
            )
        whole = [leaf for leaf in jax.tree.leaves(total) if not is_in_shards(leaf)]
        self._session.committed.keep_result(name, [*whole, np.array(self._reducer.owners, np.int32)])
        owners = tuple(self.hosts[index] for index in self._reducer.owners)
        self._session.finish_accumulation(call, owners, total)
        return total

    def value_and_grad(
        self,
        loss_fn: Callable[..., Any],
        data: object,
        num_microbatches: int,
        *,
        has_aux: bool = False,
        seed: int = 0,
        options: AccumulationOptions = DEFAULT_OPTIONS,
        name: str = "train",
    ) -> ValueAndGrad:
        """Return a function like `jax.value_and_grad(loss_fn)`, of the mean over all microbatches of the step.

        Call it once, before the loop; in each step `loss, gradients = value_and_grad(params, *args)`. What this
        promises when hosts die is what `accumulate_microbatches` promises, on which it is built.

        Args:
            loss_fn: `loss_fn(params, batch, *args)` returns the mean over a microbatch, or a `WeightedMean`: for a mean
                over real tokens, or rows of unequal weights, which is divided once, by the weight of the step. A
                parameter called `key`, `rng` or `dropout_rng` gets a `jax.random` key, one called `rngs` an
                `nnx.Rngs`: a function of seed, step and index alone. Define it outside of `train`: a new function is
                compiled anew.
            data: a function `batch(step, index)` that returns one microbatch; or what `make_microbatch_data` returns;
                or a `Prefetcher` of such data, which reads ahead.
            num_microbatches: microbatches of a step, however many hosts are alive.
            has_aux: True: the loss function returns `(loss, aux)`, with `aux` a pytree of numbers and arrays, such as
                metrics or batch statistics. Its mean over the microbatches is returned: `(loss, aux), gradients`; of a
                `WeightedMean` in it the mean of the step.
            seed: seed of the random numbers.
            options: how microbatches are assigned and added up.
            name: name of the accumulation; a step may have several.

        Raises:
            CallerError: `loss_fn` or `data` is something else.
        """
        check_integers(num_microbatches=num_microbatches, seed=seed)
        check_loss_function(loss_fn)
        self._loss_functions.warn_of_new(loss_fn)
        batches = open_batches(data)

        def accumulate(compute: ComputeFunction[Any], zeros: Any) -> Any:  # noqa: ANN401 - a user's tree
            return self.accumulate_microbatches(
                num_microbatches, compute, zeros, data=batches, options=options, name=name
            )

        return ValueAndGrad(
            loss_fn, batches, accumulate, num_microbatches=num_microbatches, has_aux=has_aux, seed=seed
        )

    def count_replicas(self, replica_shape: ReplicaShape = ONE_REPLICA_PER_HOST) -> int:
        """Return how many replicas the live hosts form.

        Raises:
            CallerError: the hosts are too few for one replica.
        """
        return len(self._reducer.locate_replicas(replica_shape))

    def host_of_microbatch(self, index: int) -> HostName:
        """Return the host that computed microbatch `index` of the last `accumulate_microbatches`."""
        return self.hosts[self._reducer.owners[index]]

    # Other services of the worker.

    def raise_if_ended(self) -> None:
        """Unwind the train function if its generation has ended; to be called now and then during a long wait."""
        self._control.raise_if_ended()

    def record_event(self, kind: EventKind, **detail: str | float | bool) -> None:
        """Write an event to this host's log.

        Raises:
            CallerError: a detail is not a string, a number or a bool of Python's.
        """
        for name, value in detail.items():
            if not isinstance(value, str | int | float) or isinstance(value, np.generic):
                raise CallerError(
                    f"record_event: found {name}={describe_value(value)}, expected a str, int, float or bool"
                )
        self._control.record_event(kind, **detail)


def _describe_shares(hosts: Sequence[HostName], shares: Sequence[tuple[int, float]]) -> str:
    return ", ".join(
        f"{host} {count} of {1e3 * seconds:.3g} ms"
        for host, (count, seconds) in zip(hosts, shares, strict=True)
    )


def _check_zeros(zeros: object) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(zeros):
        if isinstance(leaf, jax.Array) and (leaf.is_fully_addressable or is_on_replicas(leaf)):
            continue
        found = leaf.sharding if isinstance(leaf, jax.Array) else type(leaf).__name__
        raise CallerError(
            f"accumulate_microbatches: found {found} at zeros{jax.tree_util.keystr(path)}, expected an array on this "
            'host\'s devices, jax.device_put(zeros, NamedSharding(world.local_mesh("data"), PartitionSpec())), or on '
            "world.mesh(replica_shape)"
        )
