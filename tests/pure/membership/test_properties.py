"""The leader's, the agents' and the workers' machines in a simulated cluster, under any order of faults.

A tape of bytes chooses the next action among those that are possible (see `simulated_cluster`), so that messages arrive
late, leaders pause between a decision and its write, agents skip generations or read them twice, and hypothesis shrinks
failing tapes.
"""

import random
import re

from hypothesis import event, example, given
from hypothesis import strategies as st

from resilient_jax.protocol.generation import GenerationPhase, JobOutcomeKind, WorldChange
from tests.pure.membership.simulated_cluster import (
    COMMON_ERROR,
    NAMES,
    OWN_ERRORS,
    ROUND_S,
    Cluster,
    LateSnapshotCluster,
    ReplacingCluster,
    ReplacingSpareCluster,
    RoomyCluster,
    RoomyReplacingCluster,
    SpareCluster,
)

MOVES_PER_ROUND = 40
ROUNDS_TO_RECOVER = 600
"""Takes longer than all timeouts of CONFIG together."""


def pick(moves, choice: int):
    weighted = [action for weight, action in moves for _ in range(weight)]
    return weighted[choice % len(weighted)] if weighted else None


def disturb(cluster: Cluster, tape: bytes) -> None:
    """Play a tape: two bytes select an action."""
    for kind, choice in zip(tape[::2], tape[1::2], strict=False):
        if kind < 12:
            moves = cluster.fault_moves()
        elif kind < 40:
            moves = cluster.time_moves()
        else:
            moves = cluster.moves()
        if (action := pick(moves, choice)) is not None:
            action()
            cluster.check_one_world_trains()
        if cluster.finished:
            return


def calm_down(cluster: Cluster) -> None:
    """End all faults; absent hosts come back."""
    cluster.quarantined.clear()
    cluster.cut.clear()
    for host in cluster.hosts.values():
        host.suspended, host.connected = False, True
        if not host.alive:
            if host.lease is not None:
                cluster.expire(host)
            cluster.boot(host)
        elif not host.registered and host.lease is not None:
            cluster.expire(host)
        for worker in (host.worker, host.standby):
            if worker is not None and worker.stopped:
                cluster.kill(worker)


def play_fairly(cluster: Cluster, is_over, chance: random.Random) -> bool:
    """Let all hosts act, in any order, until `is_over()`; return False if that takes too long."""
    for _ in range(ROUNDS_TO_RECOVER):
        for _ in range(MOVES_PER_ROUND):
            action = pick(cluster.moves(), chance.randrange(2**16))
            if action is None:
                break
            action()
            cluster.check_one_world_trains()
        if is_over():
            return True
        for host in cluster.hosts.values():
            if not host.alive:
                cluster.boot(host)  # the host had left after a notice; now its machine comes back
        cluster.pass_time(ROUND_S)
    return False


def play(tape: bytes, chance: random.Random, cluster: Cluster | None = None) -> Cluster:
    """Disturb a job, let it recover and end, and check that it does both."""
    cluster = cluster or Cluster()
    disturb(cluster, tape)
    was_running, was_out = not cluster.finished, frozenset(cluster.quarantined)
    calm_down(cluster)
    has_state = any(
        host.registered
        and host.lease is not None
        and host.worker.runs
        and host.worker.held is not None
        and not host.worker.hung  # it is killed, and its memory with it
        and not (host.draining or cluster.is_outside(host) or host.name in was_out)
        for host in cluster.hosts.values()
    )
    recovered = play_fairly(cluster, lambda: cluster.finished or cluster.do_all_train, chance)
    assert recovered, f"stuck in {cluster.generation}"
    if (outcome := cluster.outcome) is not None:
        # Which error may end a job is checked where the leader decides it.
        ends = (JobOutcomeKind.STATE_LOST, JobOutcomeKind.INTERRUPTED, JobOutcomeKind.USER_ERROR)
        assert outcome.kind in ends, outcome
        if was_running and outcome.kind is JobOutcomeKind.STATE_LOST:
            assert not has_state, outcome
        return cluster
    cluster.total = max(host.worker.step for host in cluster.hosts.values()) + 2
    assert play_fairly(cluster, lambda: cluster.finished, chance), f"does not end: {cluster.generation}"
    assert cluster.outcome is not None
    assert cluster.outcome.kind is JobOutcomeKind.DONE
    members = cluster.generation.membership.members if cluster.generation is not None else ()
    assert all(cluster.workers[m.host, m.incarnation].step == cluster.total for m in members)
    return cluster


@given(tape=st.binary(max_size=400), seed=st.integers(0, 2**16))
def test_a_job_survives_any_short_sequence_of_faults(tape, seed):
    play(tape, random.Random(seed), Cluster(has_standbys=bool(seed % 2)))


@given(seed=st.integers(0, 2**32))
def test_a_job_survives_any_long_sequence_of_faults(seed):
    chance = random.Random(seed)
    cluster = play(chance.randbytes(4000), chance, Cluster(has_standbys=bool(seed % 2)))
    event(f"ended: {cluster.outcome and cluster.outcome.kind}")
    event(f"grew: {any(g.membership.change is WorldChange.GROW for g, _ in cluster.written)}")


@given(seed=st.integers(0, 2**32))
def test_workers_that_die_one_after_the_other_return_in_place(seed):
    chance = random.Random(seed)
    cluster = Cluster(are_collectives_fragile=False)
    assert play_fairly(cluster, lambda: cluster.do_all_train, chance)
    for _ in range(6):
        before = len(cluster.written)
        cluster.kill(chance.choice(list(cluster.hosts.values())).worker)
        assert play_fairly(cluster, lambda: len(cluster.written) > before and cluster.do_all_train, chance)  # noqa: B023
    generations = [g for g, _ in cluster.written]
    grown = {
        g.number
        for g in generations
        if g.membership.change is WorldChange.GROW and g.phase is GenerationPhase.ACTIVE
    }
    event(f"grew {len(grown)} times")
    # By a re-form where the seats are used up, or the death broke the collective of a survivor first.
    assert grown


@given(seed=st.integers(0, 2**32))
def test_workers_that_hang_are_named_and_replaced_and_no_others(seed):
    chance = random.Random(seed)
    cluster = (Cluster if seed % 2 else ReplacingCluster)(are_collectives_fragile=False)
    assert play_fairly(cluster, lambda: cluster.do_all_train, chance)
    for _ in range(3):
        before = len(cluster.written)
        # If all hang, the state in their memory goes with them: so only where there are snapshots.
        most = len(NAMES) if cluster.config.replaces_workers else len(NAMES) - 1
        hung = chance.sample(list(cluster.hosts.values()), chance.choice((1, 1, 2, most)))
        workers = [host.worker for host in cluster.hosts.values()]
        kept = [w for w in workers if w.host not in [host.name for host in hung]]
        for host in hung:
            host.worker.hang()
        assert play_fairly(
            cluster,
            lambda: cluster.do_all_train and not any(w.hung for w in cluster.workers.values() if w.runs),
            chance,
        ), f"stuck in {cluster.generation}"
        changes = [g for g, _ in cluster.written[before:] if g.phase is GenerationPhase.QUIESCE]
        named = next(g.failures.hang for g in changes if g.failures.hang)
        assert ("no host makes progress" in named) == (not kept), named
        assert {name for name in NAMES if re.search(rf"\b{name} (has not entered|is still in)", named)} == {
            host.name for host in hung
        }
        if cluster.config.replaces_workers:
            continue  # the workers that waited are replaced, too
        assert all(w.alive for w in kept), "killed although they only waited"


@given(seed=st.integers(0, 2**32), replaces=st.booleans())
def test_a_host_whose_script_raises_alone_is_tried_again_and_two_that_raise_the_same_end_the_job(
    seed, replaces
):
    chance = random.Random(seed)
    cluster = (ReplacingCluster if replaces else Cluster)(are_collectives_fragile=False)
    for _ in range(3):
        assert play_fairly(cluster, lambda: cluster.do_all_train, chance), f"stuck in {cluster.generation}"
        worker = chance.choice(list(cluster.hosts.values())).worker
        cluster.raise_error(worker, OWN_ERRORS[worker.host])
    assert play_fairly(cluster, lambda: cluster.do_all_train, chance), f"stuck in {cluster.generation}"
    step = min(host.worker.step for host in cluster.hosts.values())
    pair = [host.worker for host in cluster.hosts.values() if host.worker.step == step][:2]
    for worker in pair:
        cluster.raise_error(worker, COMMON_ERROR)
    assert play_fairly(cluster, lambda: cluster.finished or cluster.do_all_train, chance), cluster.generation
    assert cluster.finished == (len(pair) == 2)
    assert cluster.outcome is None or cluster.outcome.message == COMMON_ERROR


@given(seed=st.integers(0, 2**32), replaces=st.booleans(), is_beginning=st.booleans())
def test_two_hosts_that_cannot_reach_each_other_cost_one_of_them_and_one_more_world(
    seed, replaces, is_beginning
):
    chance = random.Random(seed)
    cluster = (ReplacingCluster if replaces else Cluster)(are_collectives_fragile=False)
    if not is_beginning:
        assert play_fairly(cluster, lambda: cluster.do_all_train, chance)
    before = len(cluster.written)
    pair = frozenset(chance.sample(NAMES, 2))
    cluster.cut.add(pair)
    assert play_fairly(cluster, lambda: cluster.are_all_others_training(pair), chance), cluster.generation
    assert len(cluster.quarantined) == 1
    assert cluster.quarantined <= pair
    changes = [g for g, _ in cluster.written[before:]]
    named = [g.reason for g in changes if g.failures.separated]
    assert named
    assert all("cannot reach" in reason and pair <= set(re.findall(r"\w+", reason)) for reason in named)
    assert not any(g.failures.attempts for g in changes), "a world fails, and is formed again"


@given(seed=st.integers(0, 2**32))
def test_a_death_at_any_moment_of_a_return_is_survived(seed):
    chance = random.Random(seed)
    cluster = Cluster(are_collectives_fragile=False)
    assert play_fairly(cluster, lambda: cluster.do_all_train, chance)
    for _ in range(3):
        for _ in range(2):
            cluster.kill(chance.choice(list(cluster.hosts.values())).worker)
            for _ in range(chance.randrange(120)):
                if (action := pick(cluster.moves(), chance.randrange(2**16))) is not None:
                    action()
                    cluster.check_one_world_trains()
        assert play_fairly(cluster, lambda: cluster.do_all_train or cluster.finished, chance)
    grown = any(g.membership.change is WorldChange.GROW for g, _ in cluster.written)
    event(f"grew: {grown}, ended: {cluster.outcome and cluster.outcome.kind}")


@given(seed=st.integers(0, 2**32))
def test_a_job_whose_workers_are_all_replaced_survives_any_sequence_of_faults(seed):
    chance = random.Random(seed)
    cluster = play(
        chance.randbytes(chance.choice((400, 4000))), chance, ReplacingCluster(has_standbys=bool(seed % 2))
    )
    event(f"ended: {cluster.outcome and cluster.outcome.kind}")
    event(f"restored: {any(g.state.snapshot is not None for g, _ in cluster.written)}")


@given(seed=st.integers(0, 2**32))
def test_where_no_snapshot_has_the_state_the_workers_that_have_it_are_not_replaced(seed):
    chance = random.Random(seed)
    cluster = play(chance.randbytes(chance.choice((400, 4000))), chance, LateSnapshotCluster())
    event(f"ended: {cluster.outcome and cluster.outcome.kind}")
    stops = [g for g, _ in cluster.written if g.phase is GenerationPhase.QUIESCE]
    members = [g.membership.members for g in stops]
    event(f"kept: {any(members)}, replaced: {not all(members[1:])}")


@given(seed=st.integers(0, 2**32), replaces=st.booleans())
def test_standbys_in_their_seats_replace_workers_that_die_without_a_smaller_world(seed, replaces):
    chance = random.Random(seed)
    cluster = RoomyReplacingCluster() if replaces else RoomyCluster()
    for _ in range(4):
        assert play_fairly(cluster, lambda: cluster.is_whole, chance), f"not whole: {cluster.generation}"
        before = cluster.generation
        assert before is not None
        cluster.kill(chance.choice(list(cluster.hosts.values())).worker)
        # One death after the other: a second one before the standby has its seat costs a smaller world.
        assert play_fairly(cluster, lambda b=before: cluster.is_past(b.number), chance)
        after = [g for g, _ in cluster.written if g.number > before.number]
        assert {
            (len(g.membership.members), g.membership.change, g.membership.world)
            for g in after
            if g.phase is GenerationPhase.ACTIVE
        } == {(len(NAMES), WorldChange.GROW, before.membership.world)}


@given(seed=st.integers(0, 2**32), replaces=st.booleans())
def test_standbys_and_workers_that_die_at_any_moment_are_survived(seed, replaces):
    chance = random.Random(seed)
    cluster = RoomyReplacingCluster() if replaces else RoomyCluster()
    assert play_fairly(cluster, lambda: cluster.is_whole, chance)
    for _ in range(3):
        for _ in range(chance.randrange(1, 4)):
            hosts = list(cluster.hosts.values())
            workers = [w for h in hosts for w in (h.worker, h.standby) if w is not None]
            cluster.kill(chance.choice(workers))
            for _ in range(chance.randrange(60)):
                if (action := pick(cluster.moves(), chance.randrange(2**16))) is not None:
                    action()
                    cluster.check_one_world_trains()
        assert play_fairly(cluster, lambda: cluster.do_all_train or cluster.finished, chance)
    event(f"ended: {cluster.outcome and cluster.outcome.kind}")


@given(seed=st.integers(0, 2**32))
@example(seed=83168)  # the only members hang, all of them
@example(seed=12479)  # a quarantine is lifted after the leader has chosen members without the host
def test_a_job_with_a_spare_survives_any_sequence_of_faults(seed):
    chance = random.Random(seed)
    make = chance.choice((SpareCluster, SpareCluster, ReplacingSpareCluster))
    cluster = make(has_standbys=chance.choice((True, False)))
    play(chance.randbytes(chance.choice((400, 4000))), chance, cluster)
    event(f"ended: {cluster.outcome and cluster.outcome.kind}")
    event(f"used: {any(g.membership.find_member(NAMES[-1]) for g, _ in cluster.written)}")


@given(seed=st.integers(0, 2**32))
def test_lost_hosts_are_replaced_by_whichever_is_ready_and_then_nothing_changes(seed):
    chance = random.Random(seed)
    make = chance.choice((SpareCluster, SpareCluster, ReplacingSpareCluster))
    cluster = make(are_collectives_fragile=False, has_standbys=chance.choice((True, False)))
    for _ in range(3):
        assert play_fairly(cluster, lambda: cluster.is_settled or cluster.finished, chance)
        if cluster.finished:  # two hosts with the only copies were lost at once
            break
        settled = cluster.generation
        assert settled is not None
        rounds = iter(range(100))
        play_fairly(cluster, lambda: next(rounds) == 20, chance)  # noqa: B023
        assert cluster.generation is not None
        assert cluster.generation.number == settled.number, cluster.generation.reason
        for host in chance.sample(list(cluster.hosts.values()), chance.choice((1, 1, 2))):
            cluster.kill_host(host)
            if chance.randrange(2):
                cluster.expire(host)
            for _ in range(chance.randrange(60)):
                if (action := pick(cluster.moves(), chance.randrange(2**16))) is not None:
                    action()
                    cluster.check_one_world_trains()
        calm_down(cluster)
    event(f"used: {any(g.membership.find_member(NAMES[-1]) for g, _ in cluster.written)}")
    event(f"grew: {any(g.membership.change is WorldChange.GROW for g, _ in cluster.written)}")
