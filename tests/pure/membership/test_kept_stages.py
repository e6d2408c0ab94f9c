"""Stages that are kept, and groups of hosts that were: beyond the scenarios in `parts.txt`."""

import dataclasses

import msgspec

from resilient_jax.cluster.notice_grace import DEFAULT_GRACE_S
from resilient_jax.ids import HostName
from resilient_jax.membership import kept_stages, next_members
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.state_records import StageOutlook, StatePart
from tests.support.membership_job import sharded, training

PART = StatePart.from_units(range(4), 7)


def test_copies_and_the_steps_after_them_fit_into_the_time_of_a_notice():
    job = training("a", "b")
    job.pass_time(2.0)
    job.train(26)  # 20 steps after one that may have been reported late
    assert job.config.notice_s == DEFAULT_GRACE_S
    found = [
        next_members.limit_notice_copies_s(
            job.state, job.now_s, dataclasses.replace(job.config, notice_s=seconds)
        )
        for seconds in (25.0, 6.0, 2.0)
    ]
    assert found[0] == next_members.LEAVING_COPY_TIMEOUT_S
    assert found[0] > found[1] >= found[2] == 0.0


def make_outlook(*replicas: str, kept: float = 0.6, move_s: float = 50.0) -> StageOutlook:
    """Return what the loss of hosts of these replicas would make of a pipeline: half the speed that was `kept`."""
    numbers = range(1, 4)
    return StageOutlook(
        replicas=tuple(tuple(map(HostName, replica)) for replica in replicas),
        kept=(1.0, *(kept / number if number < len(replicas) else 0.0 for number in numbers)),
        cut=(1.0, *(0.9 - 0.1 * number for number in numbers)),
        move_s=(0.0, *(move_s for _ in numbers)),
    )


def test_no_stage_is_lost_with_nobody_or_beside_a_host_that_no_estimate_has():
    job = sharded("abcd", parity=2)
    part = msgspec.structs.replace(PART, outlook=make_outlook("ab", "cd"))
    job.report("a", part=part)
    hosts = {str(host): status for host, status in job.state.hosts.items()}
    assert kept_stages.find_stage_loss(list(hosts.values()), ()) is None
    found = kept_stages.find_stage_loss([hosts[name] for name in "abd"], ())
    assert found is not None
    assert found.hosts == ("c",)
    assert kept_stages.find_stage_loss([hosts[name] for name in "abd"], [hosts["c"]]) is None
    job.report("a", part=msgspec.structs.replace(PART, outlook=make_outlook("ab", "c")))
    assert kept_stages.find_stage_loss(list(job.state.hosts.values()), ()) is None


def test_hosts_before_are_noted_no_longer_than_a_record_may_be():
    job = sharded("abcd")
    groups = (tuple(map(HostName, "abc")),) * kept_stages.MAX_GROUPS
    generation = change_fields(job.generation, earlier_stage_hosts=groups)
    found = kept_stages.list_groups(dataclasses.replace(job.state, generation=generation))
    assert found == (*groups[1:], tuple("abcd"))
