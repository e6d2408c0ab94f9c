"""`python tests/mutations.py`: change critical code in small ways, one at a time, and see that its tests notice.

A test that no wrong program fails is worth nothing. Each mutation is a mistake that somebody could make, in code where
it would cost weights, states or the job; the tests of its area, of the tiers pure, jax and process, must fail with it.
One that survives shows what is not tested: it gets its test, and stays here. `make test-all` calls this.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from resilient_jax.cluster.child_process import bind_to_this_process
from tests.support.compile_cache import CACHE
from tests.support.paths import ROOT
from tests.support.patience import patience

AREA_S: Final = 60.0
"""What the tests of an area take on an idle machine, at most."""

AREAS: Final[Mapping[str, tuple[str, ...]]] = {
    "membership": ("tests/pure/membership",),
    "leader": ("tests/pure/cluster/test_leader.py", "tests/pure/cluster/test_host_losses.py"),
    "leases": ("tests/pure/store/test_session.py", "tests/jax/worker/test_guard_lease.py"),
    "store": ("tests/pure/store",),
    "watches": ("tests/pure/store", "tests/process/store/test_remote.py"),
    "tokens": (
        "tests/pure/transport/test_authentication.py",
        "tests/process/transport/test_impostors.py",
        "tests/process/transport/test_peer_calls.py",
    ),
    "votes": ("tests/pure/snapshot",),
    "parity": ("tests/pure/erasure", "tests/pure/snapshot"),
    "quotas": ("tests/pure/step",),
    "sums": (
        "tests/jax/step/test_fixed_point_sum.py",
        "tests/jax/step/test_binned_sum.py",
        "tests/jax/step/test_claims.py",
        "tests/jax/step/test_contributions.py",
        "tests/jax/step/test_exact_accumulation.py",
    ),
    "updates": ("tests/jax/sharding/test_exact_reductions.py", "tests/jax/sharding/test_jaxprs.py"),
    "audits": ("tests/jax/step/test_audit.py",),
    "commit": ("tests/jax/worker", "tests/jax/state"),
    "digests": ("tests/jax/state/test_digest.py", "tests/process/worker/test_host_comparison.py"),
    "transfer": ("tests/jax/state/test_boxes_of_workers.py", "tests/process/state/test_transfer.py"),
    "leaf kinds": ("tests/jax/state/test_leaf_kinds.py", "tests/process/state/test_leaf_kinds.py"),
    "pipeline commit": ("tests/jax/pipeline",),
    "program": (
        "tests/pure/cluster/test_script_admission.py",
        "tests/pure/cluster/test_kept_program.py",
        "tests/process/worker/test_kept_imports.py",
        "tests/process/cluster/test_zygote.py",
    ),
}
"""The tests of each area."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mutation:
    """A small wrong change.

    Attributes:
        area: whose tests must notice; a key of `AREAS`.
        file: of the package.
        right: what stands there, once.
        wrong: what stands there instead.
        means: what the program does then.
    """

    area: str
    file: str
    right: str
    wrong: str
    means: str


MUTATIONS: Final = (
    # Membership.
    Mutation(
        "membership",
        "membership/job_end.py",
        "return find_newest_step(state) > (_find_saved_step(state) or 0)",
        "return False",
        "a job whose hosts got their notices one after the other ends without a checkpoint",
    ),
    Mutation(
        "membership",
        "membership/job_end.py",
        "all(status.is_interrupted for status in hosts)",
        "any(status.is_interrupted for status in hosts)",
        "Ctrl-C on one host ends the job of the others",
    ),
    Mutation(
        "membership",
        "membership/tally.py",
        "if counts[Fact.INTERRUPTED] and counts[Fact.INTERRUPTED] == len(self._state.hosts):",
        "if counts[Fact.INTERRUPTED] > len(self._state.hosts):",
        "a leader does not look at Ctrl-C on all hosts while they train",
    ),
    Mutation(
        "membership",
        "membership/rules.py",
        "if not (worker.report.place.has_formed and worker.report.generation == generation.number)",
        "if not worker.report.place.has_formed",
        "a member that has formed another generation counts as formed",
    ),
    Mutation(
        "membership",
        "membership/rules.py",
        "if is_idle(worker) and worker.report.generation >= generation.number:",
        "if is_idle(worker):",
        "a member counts as unwound that has not read that it must",
    ),
    Mutation(
        "membership",
        "membership/reachability.py",
        "if not pairs or any(other not in reports[host].lasting for host, other in one_sided):",
        "if not pairs:",
        "a host that has just died counts as one that others cannot reach, and is quarantined",
    ),
    Mutation(
        "membership",
        "membership/reachability.py",
        "if find_recoverable_step(state) > 0 and not is_state_left:",
        "if find_recoverable_step(state) < 0 and not is_state_left:",
        "a host that others cannot reach is taken out with the last copy of the state",
    ),
    Mutation(
        "membership",
        "membership/reachability.py",
        "keeps_newest = newest is None or left is None or left.step >= newest.step",
        "keeps_newest = newest is None or left is None or left.step >= 0",
        "of two hosts that cannot reach each other that with the newest state may leave",
    ),
    Mutation(
        "membership",
        "membership/facts.py",
        "        if not is_cut_off(state, host)\n        for s in status.services",
        "        for s in status.services",
        "members go on with the coordination service of a host that some of them cannot reach",
    ),
    Mutation(
        "leader",
        "cluster/leader.py",
        "must_resign = leader._is_leaving() or leader._was_quarantined",
        "must_resign = leader._is_leaving()",
        "a leader goes on in quarantine",
    ),
    Mutation(
        "membership",
        "membership/generation_end.py",
        "GenerationNumber(state.generation.number + 1)",
        "state.generation.number",
        "two sets of members have one number",
    ),
    Mutation(
        "membership",
        "membership/rules.py",
        "return _settle(state, now, config) if all(map(is_idle, list_live_workers(state))) else None",
        "return _settle(state, now, config) if any(map(is_idle, list_live_workers(state))) else None",
        "a planned change does not wait for all members",
    ),
    Mutation(
        "membership",
        "membership/rules.py",
        "if generation.membership.members and all(w.report.is_done for w in list_live_workers(state)):",
        "if generation.membership.members and any(w.report.is_done for w in list_live_workers(state)):",
        "the job is over when one host is done",
    ),
    Mutation(
        "membership",
        "membership/generation_end.py",
        "attempts = (failed if made_progress else generation.failures.attempts + failed) if no_member_died else 0",
        "attempts = 0",
        "failures that no death explains are retried for ever",
    ),
    Mutation(
        "membership",
        "membership/generation_end.py",
        "failed = int(why.is_failure)",
        "failed = 1",
        "a try with too few hosts counts as a failure of one of them",
    ),
    Mutation(
        "membership",
        "membership/raised_errors.py",
        "one.host != error.host and one.is_same_error(error)",
        "one.is_same_error(error)",
        "an error that one host alone raises ends the job",
    ),
    Mutation(
        "membership",
        "membership/worker_errors.py",
        "return outcome if is_known else None",
        "return outcome",
        "what a host raises because it is interrupted counts as its own error",
    ),
    Mutation(
        "membership",
        "membership/facts.py",
        "worker is None or worker.incarnation != member.incarnation or not worker.is_alive:",
        "worker is None or not worker.is_alive:",
        "a worker that was started again counts as the member that died",
    ),
    Mutation(
        "membership",
        "membership/facts.py",
        "    return list_able(state, state.hosts.keys() - state.quarantined)",
        "    return list_able(state, state.hosts.keys())",
        "a host in quarantine joins",
    ),
    Mutation(
        "membership",
        "membership/world_formation.py",
        "world = WorldId(generation.number)",
        "world = WorldId(max(generation.membership.world, 1))",
        "two worlds have one id",
    ),
    Mutation(
        "membership",
        "membership/world_formation.py",
        "            if w.report.held.step == step\n",
        "            if w.report.held.step >= step - 1\n",
        "a host with an older state serves it to those that join",
    ),
    Mutation(
        "membership",
        "membership/world_formation.py",
        "if snapshot is not None and (not holders or snapshot.id.step > step):",
        "if snapshot is not None and (not holders or snapshot.id.step < step):",
        "an older snapshot wins over the workers' state",
    ),
    Mutation(
        "membership",
        "membership/world_formation.py",
        "if max(steps) - min(steps) > (kind is not UnitKind.HOSTS):",
        "if not steps:",
        "parts of different states are taken for one",
    ),
    Mutation(
        "membership",
        "membership/world_formation.py",
        "by_cut.setdefault(holder.part.cut, [])",
        "by_cut.setdefault((), [])",
        "shards that are cut in other ways are taken for those of one cut",
    ),
    Mutation(
        "membership",
        "membership/world_formation.py",
        "            and is_trusted(generation, s.worker.report)\n",
        "",
        "a state that a corrupt host may have touched is resumed from",
    ),
    Mutation(
        "membership",
        "membership/world_formation.py",
        "if is_newcomer_alive(state, newcomer) and generation.membership.find_member(newcomer.host) != newcomer",
        "if generation.membership.find_member(newcomer.host) != newcomer",
        "a seat is kept for a worker that is dead",
    ),
    Mutation(
        "membership",
        "membership/world_formation.py",
        "next_seat=Seat(generation.membership.next_seat + len(given)),",
        "next_seat=generation.membership.next_seat,",
        "a seat is given to two workers",
    ),
    Mutation(
        "membership",
        "membership/world_formation.py",
        """return "" if kept or joiners else""",
        """return "" if len(kept) + len(joiners) > 1 else""",
        "a host that is left alone leaves its world",
    ),
    Mutation(
        "membership",
        "membership/rules.py",
        "joiners = [status for status in joiners if not is_cold(status)]",
        "pass",
        "all wait for the programs of a host that has loaded none",
    ),
    Mutation(
        "store",
        "store/journal.py",
        "if bool(why) != self._has_trouble:",
        "if False:",
        "a journal on a full disk stalls the job without a word",
    ),
    # The leader's fence.
    Mutation(
        "membership",
        "membership/recovery_decision.py",
        "        and is_wait_over(state, now)\n",
        "",
        "axes are kept for no time at all",
    ),
    Mutation(
        "leader",
        "cluster/leader.py",
        "                Compare(leader, CompareTarget.CREATE_REVISION, CompareOperator.EQUAL, self._token),\n",
        "",
        "a leader that was deposed writes the generation",
    ),
    Mutation(
        "leader",
        "cluster/leader.py",
        "[require_absent(key)], [PutOp(key, ENCODER.encode(self._record), lease)], [RangeOp(key)]",
        "[], [PutOp(key, ENCODER.encode(self._record), lease)], [RangeOp(key)]",
        "an agent takes the lead from one that leads",
    ),
    Mutation(
        "leader",
        "cluster/leader.py",
        "self._known_revision = stored.mod_revision if stored else Revision(0)",
        "self._known_revision = Revision(0)",
        "a new leader does not go on from the stored generation",
    ),
    Mutation(
        "leader",
        "cluster/quarantine.py",
        "    if leader_token is None:\n        return []\n",
        "    if leader_token is not None:\n        return []\n",
        "a leader that was deposed quarantines hosts",
    ),
    # Leases.
    Mutation(
        "leases",
        "cluster/store_session.py",
        "                self._renewed_s = started_s\n",
        "                self._renewed_s = self._clock.monotonic_s()\n",
        "a lease counts from after the answer",
    ),
    Mutation(
        "leases",
        "cluster/store_session.py",
        "        self.lease = await self._store.grant(self._ttl_s)\n",
        "        self.lease = await self._store.grant(self._ttl_s)\n        self._renewed_s = self._clock.wall_s()\n",
        "a new lease counts from after the answer",
    ),
    Mutation(
        "leases",
        "cluster/store_session.py",
        "min(self._clock.monotonic_s() + interval_s / 4, self.valid_until_s)",
        "self._clock.monotonic_s() + interval_s",
        "a host goes on after its lease",
    ),
    Mutation(
        "leases",
        "cluster/store_session.py",
        "            if not ours:\n                raise LeaseExpired",
        "            if False:\n                raise LeaseExpired",
        "a host that was replaced is not told",
    ),
    Mutation(
        "leases",
        "worker/guard_thread.py",
        "if is_training and looked_s > self._lease_until_s:",
        "if is_training and looked_s > self._lease_until_s + 5.0:",
        "a worker trains on after the lease of its host",
    ),
    # The store.
    Mutation(
        "store",
        "store/state_machine.py",
        "(state.deadline_s, lease) for lease, state in self._leases.items() if state.deadline_s <= now_s",
        "(state.deadline_s, lease) for lease, state in self._leases.items() if state.deadline_s < now_s - 1.0",
        "a lease ends a second late",
    ),
    Mutation(
        "store",
        "store/state_machine.py",
        "        state.deadline_s = now_s + state.ttl_s\n        return state.ttl_s\n",
        "        return state.ttl_s\n",
        "a renewal renews nothing",
    ),
    Mutation(
        "store",
        "store/state_machine.py",
        "succeeded = all(_holds(compare, self._keys.get(compare.key)) for compare in compares)",
        "succeeded = any(_holds(compare, self._keys.get(compare.key)) for compare in compares) or not compares",
        "a transaction asks for one of its conditions alone",
    ),
    Mutation(
        "store",
        "store/state_machine.py",
        "create_revision=before.create_revision if before else revision,",
        "create_revision=revision,",
        "the fencing token changes with each write",
    ),
    Mutation(
        "store",
        "store/state_machine.py",
        "        elif before.lease != NO_LEASE:\n            self._leases[before.lease].keys.discard(operation.key)\n",
        "        elif False:\n            self._leases[before.lease].keys.discard(operation.key)\n",
        "the end of an old lease deletes a key of a new one",
    ),
    Mutation(
        "store",
        "store/change_history.py",
        "if from_revision <= self.compacted_revision:",
        "if from_revision < self.compacted_revision:",
        "a watch misses the last change that was forgotten, and is not told",
    ),
    # Watches.
    Mutation(
        "watches",
        "store/watch_resumption.py",
        "                    next_revision, has_answered = following, True\n",
        "                    next_revision, has_answered = Revision(following + 1), True\n",
        "a watch that resumes misses a change",
    ),
    Mutation(
        "watches",
        "store/watch_resumption.py",
        "                    next_revision, has_answered = following, True\n",
        "                    has_answered = True\n",
        "a watch that resumes tells all changes again",
    ),
    # Tokens.
    Mutation(
        "tokens",
        "transport/authentication.py",
        "        if call is None:\n            reason",
        '        if call is None and peer == "":\n            reason',
        "a call without a proof ends in another error",
    ),
    Mutation(
        "tokens",
        "transport/call_proofs.py",
        "return hmac.compare_digest(self.sign(text), proof)",
        "return self.sign(text).startswith(proof)",
        "a prefix of a signature is enough",
    ),
    Mutation(
        "tokens",
        "transport/call_proofs.py",
        'return hmac.digest(self._token, text, "sha256")',
        'return hmac.digest(self._token, b"", "sha256")',
        "one signature is good for all texts",
    ),
    Mutation(
        "tokens",
        "transport/call_proofs.py",
        "        signed.update(data)\n",
        "",
        "the signature of a call is good for any request",
    ),
    Mutation(
        "tokens",
        "transport/call_proofs.py",
        "        if not window.use(number):\n",
        "        if not window.use(number) and not number:\n",
        "a call that was overheard can be made again",
    ),
    Mutation(
        "tokens",
        "transport/client_sessions.py",
        '        if not self._token.is_signature(unsigned.signed_text(b"welcome"), welcome.proof):\n',
        "        if not welcome.proof:\n",
        "a client calls a server that has not proved itself",
    ),
    Mutation(
        "tokens",
        "transport/channel.py",
        "                if not has_proof(await call.trailing_metadata(), session, number):\n",
        "                if not session:\n",
        "who takes the port of a server later is believed",
    ),
    Mutation(
        "tokens",
        "transport/server.py",
        "if self._credentials.tls is None and request.address != self.address:",
        "if not self.address:",
        "a server proves itself to an impostor that passes its proofs on",
    ),
    Mutation(
        "tokens",
        "transport/peer_handshake.py",
        "        if own_address is not None:\n",
        "        if own_address is None:\n",
        "a peer proves itself to an impostor that passes its proofs on",
    ),
    Mutation(
        "tokens",
        "transport/peer_handshake.py",
        "    if not token.is_signature(_welcome_text(own, challenge.nonce), answer.proof):\n",
        "    if not answer.proof:\n",
        "a caller believes a peer that has not proved itself",
    ),
    # Votes on snapshots.
    Mutation(
        "votes",
        "snapshot/commit_votes.py",
        "return self._complete.get(id, set()).issuperset(hosts)",
        "return bool(self._complete.get(id))",
        "a snapshot is committed when one host is complete",
    ),
    Mutation(
        "votes",
        "snapshot/commit_votes.py",
        "        self._outcomes.setdefault(id, outcome)\n",
        "        self._outcomes[id] = outcome\n",
        "a committed snapshot is dropped",
    ),
    Mutation(
        "votes",
        "snapshot/slot_choice.py",
        "held.phase is SlotPhase.COMMITTED\n            or (held.phase is SlotPhase.COMPLETE and",
        "held.phase is not SlotPhase.EMPTY\n            or (held.phase is SlotPhase.COMPLETE and",
        "the slot of a snapshot that may still be committed is taken",
    ),
    Mutation(
        "votes",
        "snapshot/slot_choice.py",
        "return (id.generation, id.step)",
        "return (id.step, id.generation)",
        "a snapshot of a generation that went back counts as old",
    ),
    Mutation(
        "votes",
        "snapshot/snapshot_choice.py",
        "if reported.spare >= 0 and (chosen is None or reported.spare > chosen.spare):",
        "if chosen is None or reported.spare > chosen.spare:",
        "a snapshot is chosen that cannot be rebuilt",
    ),
    Mutation(
        "votes",
        "snapshot/snapshot_choice.py",
        "        if status.group == known and status.num_groups == self.num_groups:\n",
        "        if True:\n",
        "parts of different layouts are put together",
    ),
    # Parity.
    Mutation(
        "parity",
        "snapshot/parity_groups.py",
        "groups = (sorted(ordered[first::count], key=place.__getitem__) for first in range(count))",
        "groups = (sorted(ordered[i * len(ordered) // count : (i + 1) * len(ordered) // count]) for i in range(count))",
        "a failure domain is all of a group",
    ),
    Mutation(
        "parity",
        "erasure/reed_solomon.py",
        'g = add_vectors(g + b"\\x00", b"\\x00" + scale_vector(g, POWERS[i]))',
        'g = add_vectors(g + b"\\x00", b"\\x00" + scale_vector(g, POWERS[i + 1]))',
        "another code than that of the files",
    ),
    Mutation(
        "parity",
        "erasure/reed_solomon.py",
        "    columns.reverse()\n",
        "",
        "the rows of the parity matrix are those of other shards",
    ),
    Mutation(
        "parity",
        "erasure/reed_solomon.py",
        "linear_combination(code.parity_matrix[shard - k], data_rows, bytes(k))",
        "linear_combination(code.parity_matrix[0], data_rows, bytes(k))",
        "each lost parity shard is computed as the first",
    ),
    Mutation(
        "parity",
        "erasure/reed_solomon.py",
        "    if len(present) < k:\n",
        "    if len(present) < k - 1:\n",
        "shards are computed from too few others",
    ),
    # Quotas and claims.
    Mutation(
        "quotas",
        "step/quotas.py",
        "        if not accepted[:, has].any():\n",
        "        if not accepted[:host, has].all():\n",
        "a microbatch is in the sum twice",
    ),
    Mutation(
        "quotas",
        "step/quotas.py",
        "is_complete = np.all(",
        "is_complete = np.any(",
        "a microbatch counts although shards of it are lost",
    ),
    Mutation(
        "sums",
        "step/contributions.py",
        "is_cut_alike = (replica_shape, rank) == (self.replica_shape, self.rank)",
        "is_cut_alike = replica_shape == self.replica_shape",
        "shards of one part of an array are added to those of another",
    ),
    Mutation(
        "sums",
        "step/contributions.py",
        "if in_shards != self.in_shards or (in_shards and not is_cut_alike):",
        "if in_shards and not is_cut_alike:",
        "shards of sums are taken for whole ones by a host that is left alone",
    ),
    Mutation(
        "membership",
        "policy/loss_options.py",
        "prices.seconds[TimedChange.NEW_AXES], loss.plan.move_s)",
        "prices.seconds[TimedChange.NEW_AXES])",
        "axes are changed as if no shard moved for them",
    ),
    Mutation(
        "quotas",
        "pipeline_schedule/makespan.py",
        "for counts in assign_tasks(tasks, machines).task_counts)",
        "for counts in assign_tasks(tasks - tasks % len(speeds), machines).task_counts)",
        "microbatches that cannot be shared evenly are left out",
    ),
    Mutation(
        "quotas",
        "pipeline_schedule/makespan.py",
        "task_s=1 / speed) for speed",
        "task_s=speed) for speed",
        "slow hosts get more to do",
    ),
    # Sums.
    Mutation(
        "sums",
        "step/fixed_point_sum.py",
        "shares = np.where(is_something, 1 << relative, 0).sum(axis=0, dtype=np.int64)",
        "shares = np.where(is_something, 1 << relative, 0).max(axis=0)",
        "many addends overflow without a word",
    ),
    Mutation(
        "sums",
        "step/fixed_point_sum.py",
        "(shares > 1 << SHARE_BITS)",
        "(shares > 4 << SHARE_BITS)",
        "a sum beyond its limit counts",
    ),
    Mutation(
        "sums",
        "step/fixed_point_sum.py",
        " | ((num_near == 0) & (num_not_zero > 0))",
        "",
        "a limit that is too high loses digits without a word",
    ),
    Mutation(
        "sums",
        "step/claims.py",
        "microbatches=np.where(is_refused[:, None], 0, self.microbatches),",
        "microbatches=self.microbatches,",
        "totals of different units are added",
    ),
    Mutation(
        "sums",
        "step/fixed_point_sum.py",
        "    wanted += (num_addends - 1).bit_length()\n",
        "",
        "limits do not grow with the number of addends",
    ),
    Mutation(
        "sums",
        "step/fixed_point_sum.py",
        "exponent = jnp.where(biased == 2**info.nexp - 1, NOT_FINITE, biased + info.minexp)",
        "exponent = biased + info.minexp",
        "an addend that is not finite is taken for a number",
    ),
    Mutation(
        "sums",
        "step/fixed_point_sum.py",
        "jnp.rint(rest)",
        "jnp.floor(rest)",
        "addends are rounded downwards",
    ),
    Mutation(
        "sums",
        "step/binned_sum.py",
        "jnp.where(old == new, slot, 0)",
        "slot",
        "slices of another bin are added",
    ),
    # Audits.
    Mutation(
        "updates",
        "sharding/exact_reductions.py",
        "        return [_round(results[0], zero)]\n",
        "        return results\n",
        "a product is fused with an addition or not, by the shapes of shards",
    ),
    Mutation(
        "updates",
        "sharding/exact_reductions.py",
        "return _round(dividend * scale * _round(1 / (divisor * scale), zero), zero)",
        "return dividend / divisor",
        "a quotient is a product with a reciprocal or not, by the shapes of shards",
    ),
    Mutation(
        "updates",
        "sharding/exact_array_sum.py",
        "most = min(INTEGER_BITS - _log2(num_inner), MAX_WORD_BITS)",
        "most = min(INTEGER_BITS + 1 - _log2(num_inner), MAX_WORD_BITS)",
        "sums of large addends overflow",
    ),
    Mutation(
        "updates",
        "sharding/exact_array_sum.py",
        "room = INTEGER_BITS - 1 - _log2(num_outer)",
        "room = INTEGER_BITS + 1 - _log2(num_outer)",
        "sums of digits overflow",
    ),
    Mutation(
        "updates",
        "sharding/exact_array_sum.py",
        "carry = (total + (1 << (digit_bits - 1))) >> digit_bits",
        "carry = total >> digit_bits",
        "a small sum of addends of both signs has no precision",
    ),
    Mutation(
        "updates",
        "sharding/exact_array_sum.py",
        "rest = (rest - word) * dtype.type(2.0**form.word_bits)",
        "rest = rest * dtype.type(2.0**form.word_bits)",
        "what the first word has is in the second, too",
    ),
    Mutation(
        "updates",
        "sharding/exact_array_sum.py",
        "groups[(meaning, dtype) if is_scalar else index].append(index)",
        "groups[dtype if is_scalar else index].append(index)",
        "sums of other formats are read alike",
    ),
    Mutation(
        "updates",
        "sharding/jaxprs.py",
        "@dataclasses.dataclass(frozen=True, slots=True, eq=False)",
        "@dataclasses.dataclass(frozen=True, slots=True)",
        "a value of a program is taken for another",
    ),
    Mutation(
        "audits",
        "step/audit_run.py",
        "differing = [i for i in range(len(audits)) if (owners[i] != auditors[i]).any()]",
        "differing = [i for i in range(len(audits)) if (owners[i] != owners[i]).any()]",
        "an audit compares nothing",
    ),
    Mutation(
        "audits",
        "step/audit_run.py",
        "differing = [i for i in range(len(audits)) if (owners[i] != auditors[i]).any()]",
        "differing = [i for i in range(len(audits)) if (owners[i] != auditors[i]).all()]",
        "an audit passes when one word of a digest agrees",
    ),
    Mutation(
        "audits",
        "step/audit.py",
        "        return Party.OWNER, _describe_error(is_steady=owner_is_steady)",
        "        return Party.AUDITOR, _describe_error(is_steady=owner_is_steady)",
        "the sound host is taken out",
    ),
    Mutation(
        "audits",
        "step/audit.py",
        "if auditor_is_steady and evidence.referee == evidence.auditor:",
        "if evidence.referee == evidence.auditor:",
        "a host is named by one that computes another result each time",
    ),
    Mutation(
        "audits",
        "step/audit.py",
        "others = [offset for offset in range(1, num_hosts) if offset != first]",
        "others = [offset for offset in range(1, num_hosts)]",
        "a host is the referee of its own audit",
    ),
    Mutation(
        "audits",
        "step/audit.py",
        '_draw(spec, "step") % 2**32 < (mean % 1.0) * 2**32',
        '_draw(spec, "step") % 2**32 < (mean % 1.0) * 2**31',
        "half as many microbatches are audited as were asked for",
    ),
    # The order of a commit, and what begins a generation.
    Mutation(
        "commit",
        "step/reducer.py",
        "if kept is None or kept.spec != spec:",
        "if kept is None:",
        "what is done of one step counts for another",
    ),
    Mutation(
        "commit",
        "worker/session.py",
        "        if self._step is None or self.committed.step != self._step + 1:\n",
        "        if self._step is None:\n",
        "a snapshot is taken of a state that is not committed",
    ),
    Mutation(
        "commit",
        "worker/session.py",
        "for step in range(self.committed.step, num_steps):",
        "for step in range(self.committed.step + 1, num_steps):",
        "the step that was interrupted is left out",
    ),
    Mutation(
        "commit",
        "worker/session.py",
        "if loss is not None and loss.checkpoint_step is not None:",
        "if loss is None and False:",
        "a job that lost its state begins again without a word",
    ),
    Mutation(
        "commit",
        "worker/session.py",
        "        if self._step is None or name in self._reduced:\n",
        "        if self._step is None:\n",
        "a second accumulation of a name gets the sum of the first",
    ),
    # Digests.
    Mutation(
        "digests",
        "state/state_digest.py",
        "    if 2 * len(largest) <= len(compared) and len(groups) > 1:\n",
        "    if 2 * len(largest) < len(compared) and len(groups) > 1:\n",
        "one of two hosts that differ is taken for the right one",
    ),
    Mutation(
        "digests",
        "state/state_digest.py",
        "found, is_clear = find_differing(part[hosts, 1:].tolist())",
        "found, is_clear = find_differing(part[hosts, :1].tolist())",
        "states that differ are not compared",
    ),
    Mutation(
        "digests",
        "worker/host_comparison.py",
        "        if not has_majority:\n            raise StateError(",
        "        if False:\n            raise StateError(",
        "a job goes on with states that differ",
    ),
    Mutation(
        "digests",
        "worker/host_comparison.py",
        '        if self._host in names.split(", "):\n',
        '        if self._host not in names.split(", "):\n',
        "the sound hosts start again",
    ),
    Mutation(
        "digests",
        "worker/host_comparison.py",
        "os._exit(RESTART_EXIT_CODE)",
        "sys.exit(RESTART_EXIT_CODE)",
        "a host that differs unwinds, and waits for those that wait for it",
    ),
    # A state is what the script made.
    Mutation(
        "transfer",
        "state/box_reads.py",
        "return min(holders, key=lambda host: loads.get(host, 0))",
        "return holders[0]",
        "one worker sends all that a host that joins reads",
    ),
    Mutation(
        "transfer",
        "state/box_reads.py",
        "missing += subtract_box(wanted, chosen.box)",
        "pass",
        "what is on another host of a box is not read",
    ),
    Mutation(
        "transfer",
        "state/box_reads.py",
        "for number in failed for target",
        "for number in () for target",
        "what a source has not sent is taken for read",
    ),
    Mutation(
        "transfer",
        "state/host_shards.py",
        "if kept is not None and kept not in held:",
        "if not held:",
        "a worker offers one of its shards",
    ),
    Mutation(
        "leaf kinds",
        "state/leaf_kinds.py",
        "if spec.kind is LeafKind.WEAK_ARRAY and isinstance(value, jax.Array) and not _is_weak(value):",
        "if False:",
        "a weakly typed array comes back strongly typed",
    ),
    Mutation(
        "leaf kinds",
        "state/leaf_kinds.py",
        "KeptLeaf(np.array(leaf, HOST_KINDS[kind].dtype), kind)",
        "KeptLeaf(np.asarray(leaf, HOST_KINDS[kind].dtype), kind)",
        "a script that writes to its NumPy array changes what it has committed",
    ),
    Mutation(
        "leaf kinds",
        "state/leaf_kinds.py",
        "if placed is LeafKind.ARRAY and dtype != np.dtype(spec.dtype):",
        "if False:",
        "64-bit weights lose half of their bits",
    ),
    Mutation(
        "leaf kinds",
        "state/tree_match.py",
        "if is_raveled(leaf) or (is_initial and sharding is not None):",
        "if is_raveled(leaf) or sharding is not None:",
        "a number that was committed comes back as an array",
    ),
    Mutation(
        "leaf kinds",
        "state/restore.py",
        "kind=spec.kind, key_impl",
        "key_impl",
        "a host that joins has arrays where the others have numbers",
    ),
    Mutation(
        "leaf kinds",
        "state/state_partition.py",
        " and leaf.kind is info.kind",
        "",
        "a snapshot names the kinds of an earlier one",
    ),
    Mutation(
        "leaf kinds",
        "state/state_digest.py",
        "or jax.dtypes.canonicalize_dtype(value.dtype) == value.dtype:",
        "or True:",
        "hosts compare half of the bits of 64-bit leaves",
    ),
    Mutation(
        "leaf kinds",
        "checkpoint/array_reads.py",
        "key_impl=like.key_impl, kind=like.kind)",
        "key_impl=like.key_impl)",
        "a number comes back from storage as an array",
    ),
    # What all hosts of a pipeline know before an update.
    Mutation(
        "pipeline commit",
        "pipeline/commit_table.py",
        "if known.digest != row.digest or not is_same_norm:",
        "if not is_same_norm:",
        "holders of a block with other sums are not noticed",
    ),
    Mutation(
        "pipeline commit",
        "pipeline/commit_table.py",
        "    for number in sorted(first_rows):\n        total",
        "    for number in first_rows:\n        total",
        "the norm depends on who holds what",
    ),
    # Which program a job runs.
    Mutation(
        "program",
        "cluster/kept_program.py",
        "os.link(unfinished, path)",
        "path.write_bytes(content)",
        "who keeps a file last decides",
    ),
    Mutation(
        "program",
        "cluster/kept_program.py",
        "        if not copy.exists():\n",
        "        if True:\n            copy.unlink(missing_ok=True)\n",
        "a file that is imported under a second name is read again",
    ),
    Mutation(
        "program",
        "cluster/kept_program.py",
        '        if _digest(content) != kept.digest:\n            raise self._damaged(kept, "another content")',
        '        if False:\n            raise self._damaged(kept, "another content")',
        "an edited copy is run",
    ),
    Mutation(
        "program",
        "cluster/script_admission.py",
        "other.agent.id == job.agent_id or other.program == job.program",
        "other.agent.id == job.agent_id",
        "a program is forgotten with the host that began it",
    ),
    Mutation(
        "program",
        "cluster/script_admission.py",
        "if self._settings.is_launched or job.agent_id == self._agent_id:",
        "if job.agent_id == self._agent_id:",
        "an agent that `launch` starts again takes the edited script",
    ),
    Mutation(
        "program",
        "cluster/script_admission.py",
        "                program = record.program\n",
        "                program = uuid.uuid4().hex[:16]\n",
        "each host runs what it finds",
    ),
    Mutation(
        "program",
        "worker/kept_imports.py",
        '"path_stats": get_no_stats, ',
        "",
        "bytecode of another version of a file is run",
    ),
    Mutation(
        "program",
        "worker/kept_imports.py",
        '"get_data": get_kept_data, ',
        "",
        "modules of an import hook are read from the disk",
    ),
    Mutation(
        "program",
        "worker/kept_imports.py",
        "sys.meta_path.insert(0, _KeptFinder(self._files_by_module))",
        "del self._files_by_module",
        "a module whose file was moved is another one",
    ),
    Mutation(
        "program",
        "worker/zygote.py",
        "    begin_kept_imports(order.settings.program)\n",
        "",
        "a forked worker runs the edited script",
    ),
    Mutation(
        "pipeline commit",
        "pipeline/block_state.py",
        "mean = sums[name] / divisor",
        "mean = sums[name] / count",
        "gradients of a weighted loss are divided by the number of microbatches",
    ),
    Mutation(
        "pipeline commit",
        "pipeline/unit_copies.py",
        "[table.norm, table.loss, table.divisor]",
        "[table.norm, table.loss, 1.0]",
        "a copy is updated by sums that are not divided by the step's weight",
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutation.

    Attributes:
        is_found: whether a test failed.
        by: the test that did, or what was seen instead.
        took_s: in seconds of the wall clock.
    """

    is_found: bool
    by: str
    took_s: float


def main() -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--area", choices=AREAS, action="append", help="only these; default: all")
    parser.add_argument("--list", action="store_true", help="print the mutations, and run nothing")
    arguments = parser.parse_args()
    areas = arguments.area or list(AREAS)
    chosen = [mutation for mutation in MUTATIONS if mutation.area in areas]
    if arguments.list:
        for mutation in chosen:
            print(f"{mutation.area:16} {mutation.file:34} {mutation.means}")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        return run_all(chosen, areas, Path(folder))


def run_all(mutations: Sequence[Mutation], areas: Sequence[str], folder: Path) -> int:
    """Try each mutation in a copy of the tree, some copies at a time; print a table, and return the exit code."""
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    count = max(1, len(os.sched_getaffinity(0)))
    for number in range(count):
        copies.put(copy_tree(folder / str(number)))

    def in_a_copy(work):
        copy = copies.get()
        try:
            return work(copy)
        finally:
            copies.put(copy)

    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        # A test that fails anyway finds everything.
        sound = list(threads.map(lambda area: in_a_copy(lambda copy: run_tests(copy, AREAS[area])), areas))
        for area, verdict in zip(areas, sound, strict=True):
            if verdict.is_found:
                print(f"the tests of {area} fail without a mutation: {verdict.by}")
                return 1
        print(f"{'area':16} {'file':34} {'seconds':>7}  mutation, and the test that found it", flush=True)
        survivors = []
        tried = threads.map(lambda mutation: in_a_copy(lambda copy: try_mutation(copy, mutation)), mutations)
        for mutation, verdict in zip(mutations, tried, strict=True):
            if not verdict.is_found:
                survivors.append(mutation)
            print(
                f"{mutation.area:16} {mutation.file:34} {verdict.took_s:7.1f}  {mutation.means}: {verdict.by}",
                flush=True,
            )
    print(f"\n{len(mutations) - len(survivors)} of {len(mutations)} mutations found")
    for mutation in survivors:
        print(f"SURVIVED {mutation.file}: {mutation.means}")
    return int(bool(survivors))


def copy_tree(target: Path) -> Path:
    """Copy what git would, with what is not committed yet; return the copy."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def try_mutation(copy: Path, mutation: Mutation) -> Verdict:
    """Change the file in a copy, run the tests of its area, and change it back."""
    path = copy / "resilient_jax" / mutation.file
    sound = path.read_text()
    found = sound.count(mutation.right)
    if found != 1:
        return Verdict(
            False, f"this code stands there {found} times, expected once: write the mutation anew", 0.0
        )
    path.write_text(sound.replace(mutation.right, mutation.wrong))
    try:
        return run_tests(copy, AREAS[mutation.area])
    finally:
        path.write_text(sound)


def run_tests(copy: Path, tests: Sequence[str]) -> Verdict:
    """Run tests of a copy until one fails, in one process: the shortest files begin."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, **CACHE, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    began_s = time.monotonic()
    try:
        done = subprocess.run(
            bind_to_this_process(command),
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=patience(AREA_S),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Verdict(True, "they hang", time.monotonic() - began_s)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed:
        by = failed[0]
    elif done.returncode == 0:
        by = "nothing"
    else:  # the mutation ended pytest itself
        by = f"pytest ended with code {done.returncode}: {(done.stdout + done.stderr)[-300:].strip()}"
    return Verdict(done.returncode != 0, by, time.monotonic() - began_s)


if __name__ == "__main__":
    sys.exit(main())
