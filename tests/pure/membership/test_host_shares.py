"""Half of a host's devices are half a host."""

from resilient_jax.ids import HostName
from resilient_jax.membership.host_shares import HostShares
from tests.support.membership_job import Job


def test_a_host_that_is_gone_or_does_not_know_its_devices_counts_as_a_complete_one():
    job = Job("a", "b", "c", spare_seats=4)
    job.change("a", num_devices=8, num_used=2)
    job.change("b", num_devices=4)
    shares = HostShares.of(job.state)
    assert [shares.count_used(HostName(name)) for name in ("a", "b", "c", "gone")] == [0.25, 0.5, 1.0, 1.0]
    assert shares.sum_complete(map(HostName, ("a", "b", "c"))) == 2.5
    assert HostShares.of(Job("a").state).count_used(HostName("a")) == 1.0, "nobody knows"
