"""Joins and leaves JAX worlds, and breaks the main thread out of either and of collectives."""

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Final

import jax

from resilient_jax.errors import StateError
from resilient_jax.events import EventKind
from resilient_jax.ids import Seat
from resilient_jax.jax_runtime.abort import abort_collectives
from resilient_jax.jax_runtime.clique_connections import CliqueConnections
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.jax_runtime.distributed import (
    LeakCounts,
    WorldConnection,
    connect,
    disconnect,
    read_peer_listeners,
)
from resilient_jax.jax_runtime.failures import CliqueAborted
from resilient_jax.jax_runtime.live_nodes import end_waiting_threads, interrupt_meeting, meet_members
from resilient_jax.jax_runtime.live_processes import set_members
from resilient_jax.jax_runtime.world_forming import (
    WorldSeat,
    interrupt_forming,
    limit_interruption,
)
from resilient_jax.protocol.generation import Generation, WorldChange
from resilient_jax.protocol.generation_scoped import GenerationEnding, GenerationScoped
from resilient_jax.protocol.worker_messages import FormWorld, TakeSeat, WorkerSettings
from resilient_jax.step.replica_partners import ReplicaPartners
from resilient_jax.transport.mail_service import MailService
from resilient_jax.worker.expected_members import list_others
from resilient_jax.worker.generation_info import GenerationInfo
from resilient_jax.worker.mail_opening import MailOpener
from resilient_jax.worker.unwinding_delay import UnwindingDelay

REPLICA_PATIENCE_S: Final = 2.0
"""For a program that all hosts of a replica have begun, from the interruption on. Less than `quiesce_timeout_s`, which
leaves a worker out."""
LISTENER_TIMEOUT_S: Final = 2.0
"""A worker publishes where it listens before it asks to join, so this is the service's time to answer."""


class WorldConnector(GenerationScoped):
    """This worker's connection to at most one world at a time.

    Attributes:
        has_given_up: whether a collective of the world was given up: programs may wait behind it.
    """

    def __init__(self, settings: WorkerSettings, record_event: Callable[..., object]) -> None:
        self._settings = settings
        self._record_event = record_event
        self._connection: WorldConnection | None = None
        self._cliques = CliqueConnections(Seat(0))
        self._known_seats: frozenset[Seat] = frozenset()
        """Those of which it is known where they listen."""
        self._delay: UnwindingDelay | None = None
        """Of the present interruption."""
        self._are_spared_broken = False
        """Whether connections that an abort spares at first were shut."""
        self._has_unwound = False
        """Whether the main thread has left the user's function in this generation."""
        self.has_given_up = False
        """Whether a thread was left behind in a collective of this world."""
        self._partners: ReplicaPartners | None = None
        self._replica_mail: MailService | None = None
        """For all generations: peers that stay keep their connections."""
        self._trains_on_cpu = False
        """Whether collectives are gloo's; gloo is there for JAX's CPU devices, too, where training is on others."""

    @property
    def is_connected(self) -> bool:
        """Whether this worker is in a world."""
        return self._connection is not None

    @property
    def is_broken(self) -> bool:
        """Whether a change in place is impossible.

        The local clique is broken, a collective was given up, or a replica spans hosts whose cliques do not outlive a
        failure elsewhere: those of gloo do.
        """
        has_replicas = self._partners is not None and self._partners.have_several_hosts
        return self._are_spared_broken or self.has_given_up or (has_replicas and not self._trains_on_cpu)

    def begin_generation(self, generation: Generation) -> None:
        """Forget that the previous generation was interrupted."""
        self._delay, self._has_unwound, self._partners = None, False, None

    def form_world(self, order: FormWorld) -> None:
        """Connect to the order's world, together with all other members.

        Raises:
            FormingInterrupted, FormingFailed: as `connect`.
            StateError: this host has fewer devices than it was started for, or no GPU.
        """
        generation = order.generation
        member = generation.membership.find_member(order.host)
        assert member is not None, "an agent orders only members to form a world"
        seats = tuple(m.seat for m in generation.membership.members)
        self._connect(
            WorldSeat(
                address=order.relay_address,
                seat=member.seat,
                num_seats=generation.membership.num_seats,
                members=seats,
            )
        )
        self._meet(seats)
        self._form_local_clique()
        self._known_seats = frozenset(seats)

    def take_seat(self, order: TakeSeat) -> None:
        """Connect to a spare seat of the world in which others train. JAX counts those that would train with it.

        Raises:
            FormingInterrupted, FormingFailed, StateError: as `form_world`.
        """
        generation = order.generation
        self._connect(
            WorldSeat(
                address=order.relay_address,
                seat=order.seat,
                num_seats=generation.membership.num_seats,
                members=(),
            )
        )
        self._form_local_clique()
        self._known_seats = frozenset((order.seat,))
        seats = (*(member.seat for member in list_others(order)), order.seat)
        set_members(seats)
        self._cliques.begin(seats)

    def _connect(self, place: WorldSeat) -> None:
        connection = connect(
            place, timeout_s=self._settings.forming_timeout_s, bind_host=self._settings.address
        )
        self._connection = connection  # so that an interruption reaches the forming of the local clique
        self._cliques = CliqueConnections(place.seat)
        limit_interruption(self._cliques.is_current)
        self._are_spared_broken = self.has_given_up = False
        self._check_devices()

    def _form_local_clique(self) -> None:
        assert self._connection is not None, "only a world has cliques"
        self._cliques.form_local_clique(self._connection.gloo)

    def _meet(self, seats: tuple[Seat, ...]) -> None:
        """Have XLA learn the members' incarnations, before the first collective with them."""
        assert self._connection is not None, "members meet in a world"
        if self._settings.live_nodes and len(seats) > 1:
            started_s = time.monotonic()
            meet_members(self._connection.place, seats, self._settings.forming_timeout_s)
            self._record_event(
                EventKind.WORLD_MEMBERS_MET, hosts=len(seats), seconds=time.monotonic() - started_s
            )

    def join_members(self, generation: Generation) -> None:
        """Make the generation's members those that JAX counts, and that an interruption breaks away from.

        Raises:
            CliqueAborted: the members cannot communicate in this world.
        """
        connection = self._connection
        assert connection is not None, "a generation begins in a world"
        seats = tuple(member.seat for member in generation.membership.members)
        set_members(seats)
        # Without a service none is formed, and none is needed.
        if generation.membership.service_address and self._cliques.is_broken(seats):
            raise CliqueAborted(
                f"{connection.place.seat}: the clique of seats {seats} was aborted earlier, and cannot be made again"
            )
        unknown = [seat for seat in seats if seat not in self._known_seats]
        if unknown and generation.membership.service_address:
            listeners = read_peer_listeners(unknown, connection.place.seat, LISTENER_TIMEOUT_S)
            gloo = dataclasses.replace(
                connection.gloo, peer_listeners=connection.gloo.peer_listeners | listeners
            )
            self._connection = dataclasses.replace(connection, gloo=gloo)
            self._known_seats |= frozenset(unknown)
        # In a re-form they met when they formed the world.
        if generation.membership.change is not WorldChange.REFORM and generation.membership.service_address:
            self._meet(seats)
        self._cliques.begin(seats)

    def meet_partners(
        self, info: GenerationInfo, mail: MailOpener, raise_if_ended: Callable[[], None]
    ) -> ReplicaPartners:
        """Return the other hosts of this host's replicas, in a generation that has begun."""

        def open_mail() -> MailService:
            self._replica_mail = self._replica_mail or mail.open(info.host)
            return self._replica_mail

        self._partners = ReplicaPartners(
            info.number,
            info.hosts,
            int(info.process_index),
            open_mail=open_mail,
            wait_timeout_s=mail.wait_timeout_s,
            raise_if_ended=raise_if_ended,
            cliques=self if self._trains_on_cpu else None,
        )
        return self._partners

    def unwind(self) -> None:
        """Tell the other hosts of this host's replicas that it begins no program with them any more."""
        if self._partners is not None:
            self._partners.leave()

    def begin_program(self, seats: frozenset[Seat]) -> None:
        """Note that this process is about to run a program of a replica on several hosts, of these seats.

        Raises:
            FormingFailed: the replica's clique is broken.
        """
        assert self._connection is not None, "replicas communicate in a world"
        self._cliques.begin_program(seats, self._connection.gloo)

    def end_program(self, *, is_intact: bool) -> None:
        """Note that it has; break the replica's cliques off if they are not intact, for its other hosts, too."""
        assert self._connection is not None, "replicas communicate in a world"
        self._cliques.end_program(self._connection.gloo, is_intact=is_intact)

    def end_generation(self, ending: GenerationEnding) -> None:
        """Note which connections the members had; before this worker reports that it is idle."""
        self._has_unwound = True
        if self._connection is not None:
            self._cliques.end(self._connection.gloo, is_intact=ending.is_intact and self._delay is None)

    def close(self) -> None:
        """End what meets the other hosts of this host's replicas."""
        if self._replica_mail is not None:
            self._replica_mail.close()

    def leave(self, *, is_backend_in_use: bool) -> LeakCounts:
        """Disconnect from the world, and return what could not be freed.

        Args:
            is_backend_in_use: True: a thread still compiles for the world's devices.
        """
        connection, self._connection = self._connection, None
        assert connection is not None, "leave is called in a world"
        end_waiting_threads(connection.place)
        return disconnect(connection.gloo, is_backend_in_use=is_backend_in_use or self.has_given_up)

    def interrupt(self) -> None:
        """Break the main thread out of forming or of a collective; for the guard thread, which repeats it.

        The clique of the local devices is spared at first, because it survives a change in place, and so are those
        of earlier members, and of replicas whose hosts all live: such a replica's hosts finish together what they have
        begun together. If they have not for `REPLICA_PATIENCE_S`, one is stopped or cut off, and the replica is broken
        off. But if one device's part of a program failed, another device may wait for it in one of
        them; and gloo may wait for a connection that it has closed. So they are broken, too, and the collective is
        given up, when the main thread has not unwound soon; the next world must then be a new one.
        """
        interrupt_forming()
        interrupt_meeting()
        connection = self._connection
        if connection is None:
            return
        gloo = connection.gloo
        # What the main thread waits for once it has unwound, such as a copy for a snapshot, is no collective.
        is_late = self._delay is not None and not self._has_unwound and self._is_late(self._delay)
        if is_late and self._cliques.list_spared():
            self._are_spared_broken = True
        if self._are_spared_broken:
            abort_collectives(gloo)
        else:
            self._cliques.abort(gloo)
        if self._delay is None:  # not sooner: it takes as long as the abort
            self._delay = UnwindingDelay(time.monotonic())
        # Only gloo: a thread in NCCL keeps the device, which the next world needs.
        if is_late and self._trains_on_cpu and gloo.own_listeners and collective_thread.give_up():
            self.has_given_up = True

    def _is_late(self, delay: UnwindingDelay) -> bool:
        if not self._cliques.is_in_program:
            return delay.is_too_long(time.monotonic())
        assert self._connection is not None, "replicas communicate in a world"
        if delay.measure_s(time.monotonic()) > REPLICA_PATIENCE_S:
            self._cliques.break_program(self._connection.gloo)
            self._delay = None
        return False

    def _check_devices(self) -> None:
        # JAX takes the next platform of the list without a word where CUDA's plugin is not installed.
        wanted = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
        self._trains_on_cpu = jax.default_backend() == "cpu"
        if wanted == "cuda" and self._trains_on_cpu:
            raise StateError(
                f"--platform gpu: found CPU devices alone on host {self._settings.host}, expected GPUs. Install "
                "the extra cuda12 (pip install -e '.[cuda12]') and see whether nvidia-smi lists the GPUs, or start "
                "with --platform cpu"
            )
        expected = self._settings.devices_per_host
        found = jax.local_device_count()
        if expected is not None and found < expected:
            raise StateError(
                f"host {self._settings.host} has {found} devices, but --devices-per-host asks for {expected}; ask "
                "for fewer, or start it where there are more"
            )
