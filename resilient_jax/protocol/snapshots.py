"""Snapshots as workers, snapshot servers and the store's records name them.

A *snapshot* is the state after `step` steps, split into *parts*, one for each host of the generation that took it. The
hosts are in *groups*; in a group of n with m parity every part is split into k = n - m equal *chunks*, and each
*stripe* is k chunks of different hosts and m parity chunks on the others. Member i of a group has its chunk j in
stripe (i - m - j) mod n, as that stripe's j-th data shard, and for each row p < m the parity chunk p of stripe
(i - p) mod n. A chunk is the longest part's k-th, rounded up to complete blocks; what a shorter part lacks counts as
zeros.
"""

import enum

import msgspec

from resilient_jax.ids import GenerationNumber, HostName


class SnapshotId(msgspec.Struct, frozen=True, order=True):
    """The identity of a snapshot. The newer is the greater one; a step that is taken again has a greater generation.

    Attributes:
        step: how many steps are in the state.
        generation: the generation that took the snapshot.
    """

    step: int
    generation: GenerationNumber


class ParityGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Hosts that keep parity for each other.

    Attributes:
        hosts: the hosts in order; a host's index in `hosts` determines which chunks and parity the host has.
        parity: m, the number of hosts that may be lost. 0: none may.
    """

    hosts: tuple[HostName, ...]
    parity: int


class SnapshotLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Where the parts and parity of a generation's snapshots are. Every worker computes the same.

    Attributes:
        groups: groups of hosts; every host is in one group.
        server_endpoints: address of each host's snapshot server.
        root: the host whose server counts the complete hosts.
    """

    generation: GenerationNumber
    groups: tuple[ParityGroup, ...]
    part_bytes: dict[HostName, int]
    server_endpoints: dict[HostName, str]
    root: HostName

    def find_group(self, host: HostName) -> ParityGroup:
        """Return the group that a host is in."""
        return next(group for group in self.groups if host in group.hosts)


class SnapshotPhase(enum.StrEnum):
    """How far a snapshot is on one host."""

    COMPLETE = "complete"
    """This host has its part, and all the parity that it keeps for others."""
    COMMITTED = "committed"
    """Every host reported that it is complete."""


class SnapshotStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot as one host's server reports it.

    Attributes:
        id: the snapshot's identity.
        phase: how far the snapshot is on this host.
        group: this host's parity group, as in the snapshot's layout. Not all groups: each host would report every host.
        group_index: the index of that group in the layout.
        num_groups: how many groups the layout has.
        nbytes: the bytes that the snapshot takes in this host's memory, with parity.
        wall_s: when the snapshot became complete on this host, in seconds since 1970.
    """

    id: SnapshotId
    phase: SnapshotPhase
    group: ParityGroup
    group_index: int
    num_groups: int
    nbytes: int
    wall_s: float


class SnapshotSource(msgspec.Struct, frozen=True, kw_only=True):
    """A host whose server has a complete snapshot.

    Attributes:
        host: name of the server's host.
        endpoint: the address of the host's snapshot server.
    """

    host: HostName
    endpoint: str


class SnapshotPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot that a generation resumes from.

    Attributes:
        id: the snapshot's identity.
        groups: parity groups of the snapshot, as in its layout.
        sources: the hosts that have the snapshot complete; enough hosts of every group.
    """

    id: SnapshotId
    groups: tuple[ParityGroup, ...]
    sources: tuple[SnapshotSource, ...]


class Protection(msgspec.Struct, frozen=True, kw_only=True):
    """When the members of a generation take snapshots, so that redundancy follows the risk.

    Attributes:
        from_first_commit: whether a replicated state is in a snapshot from the first commit on, because few hosts have
            it, or no recent snapshot does; else some steps later. Training waits longer for that first copy.
        next_failure_s: after how many seconds the next failure among the members is expected; None: nobody knows.
    """

    from_first_commit: bool = True
    next_failure_s: float | None = None


class VoidSnapshots(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshots that a host which computed wrongly may have touched.

    Attributes:
        before: snapshots that were taken in generations before this one are void,
        after_step: if their states have more steps than this.
    """

    before: GenerationNumber
    after_step: int

    def has(self, id: SnapshotId) -> bool:
        """Return whether a snapshot is one of them."""
        return id.generation < self.before and id.step > self.after_step


class SnapshotServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A host's running snapshot server.

    Attributes:
        endpoint: the address where the server listens for other hosts.
        pid: the process id of the server.
    """

    endpoint: str
    pid: int
