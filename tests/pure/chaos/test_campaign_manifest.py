"""Manifests are refused with file and key, and survive formatting and parsing unchanged."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import ConfigError
from tests.chaos.manifest import (
    MAX_NUMBER,
    STORE_MEMBERS,
    ChaosJob,
    TargetPart,
    load_manifest,
    parse_manifest,
)
from tests.chaos.manifest_toml import format_manifest
from tests.chaos.paths import CAMPAIGNS, REPOSITORY
from tests.chaos.random_campaigns import (
    MAX_GAP_STEPS,
    MIN_GAP_STEPS,
    RandomCampaign,
    draw_campaign,
    list_causes,
)
from tests.chaos.targets import resolve_members
from tests.pure.chaos.campaign_manifests import manifests

GOOD = """
[[incidents]]
trigger = { after_steps = 3, failpoint = "before_reduce" }
target = { part = "worker", hosts = ["host-1"] }
fault = { kind = "stop", duration_s = 2.0 }
"""

SHIPPED = sorted(CAMPAIGNS.rglob("*.toml"))
SOAK_INCIDENTS = 200

REFUSED = {
    "a kind of fault that there is not": ('kind = "stop", duration_s = 2.0', 'kind = "stip"', "fault"),
    "a key that the fault has not": ("duration_s", "duration_x", "incidents[0].fault.duration_x"),
    "a place that there is not": ("before_reduce", "befor_reduce", "incidents[0].trigger.failpoint"),
    "a host that the job has not": ("host-1", "host-9", "incidents[0].target.hosts[0]"),
    "a host to wait for that the job has not": (
        'failpoint = "before_reduce"',
        'failpoint = "before_reduce", host = "host-9"',
        "incidents[0].trigger.host",
    ),
    "no trigger": ('after_steps = 3, failpoint = "before_reduce"', "", "incidents[0].trigger"),
    "an event that there is not": (
        "after_steps = 3",
        'event = "snapshot.begun"',
        "incidents[0].trigger.event",
    ),
    "a count of no event": ("after_steps = 3", "event_count = 2", "incidents[0].trigger.event_count"),
    "a link without namespaces": (
        'kind = "stop", duration_s = 2.0',
        'kind = "partition", duration_s = 2.0',
        "incidents[0].fault.kind",
    ),
    "an exception of an agent": (
        'part = "worker", hosts = ["host-1"] }\nfault = { kind = "stop", duration_s = 2.0',
        'part = "agent", hosts = ["host-1"] }\nfault = { kind = "raise"',
        "incidents[0].fault.kind",
    ),
    "a full disk without a disk": (
        'kind = "stop", duration_s = 2.0',
        'kind = "full_disk", duration_s = 2.0',
        "incidents[0].fault.kind",
    ),
    "a checkpoint without a folder": (
        'kind = "stop", duration_s = 2.0',
        'kind = "flip", region = "checkpoint"',
        "incidents[0].fault.path",
    ),
    "damage on the way from a worker": (
        'kind = "stop", duration_s = 2.0',
        'kind = "flip", region = "message"',
        "incidents[0].fault.region",
    ),
    "an edited script of a worker": (
        'kind = "stop", duration_s = 2.0',
        'kind = "edit_script"',
        "incidents[0].target.part",
    ),
    "a launcher that stops": ('part = "worker"', 'part = "launcher"', "incidents[0].fault.kind"),
    "a zygote that is slow": (
        'part = "worker", hosts = ["host-1"] }\nfault = { kind = "stop", duration_s = 2.0',
        'part = "zygote" }\nfault = { kind = "slow", share = 0.5, duration_s = 2.0',
        "incidents[0].fault.kind",
    ),
    "a pair of one host": (
        'part = "worker", hosts = ["host-1"] }\nfault = { kind = "stop"',
        'part = "link", hosts = ["host-1"] }\nfault = { kind = "cut_pair"',
        "incidents[0].target.hosts",
    ),
    "a clock that may not be set": (
        'kind = "stop", duration_s = 2.0',
        'kind = "clock_jump", jump_s = 60.0',
        "incidents[0].fault.kind",
    ),
}
MEMBER = GOOD.replace('"worker", hosts = ["host-1"]', '"store_member", hosts = ["member-1"]').replace(
    'failpoint = "before_reduce"', 'failpoint = "before_reduce", host = "host-1"'
)
OWN_CLUSTER = '[job]\nstore = "etcd"\n'
REFUSED_MEMBERS = {
    "a member of an embedded store": ("etcd", "embedded", "incidents[0].target.part"),
    "the process of an embedded store": ("store_member", "store", "incidents[0].target"),
    "a host as a member": ("member-1", "host-1", "incidents[0].target.hosts[0]"),
    "a failpoint of no host": (', host = "host-1"', "", "incidents[0].trigger.host"),
    "a fault of no process": ('kind = "stop", duration_s = 2.0', 'kind = "flip"', "incidents[0].fault.kind"),
    "a link without namespaces": (
        'kind = "stop"',
        'kind = "partition"',
        "incidents[0].fault.kind",
    ),
}


@pytest.mark.parametrize("case", REFUSED_MEMBERS)
def test_a_fault_that_no_member_of_the_store_can_have_is_refused(case: str) -> None:
    good = OWN_CLUSTER + MEMBER
    assert parse_manifest(good, source="good.toml").incidents[0].target.hosts == ("member-1",)
    old, new, key = REFUSED_MEMBERS[case]
    with pytest.raises(ConfigError, match=r"^broken\.toml: key '") as caught:
        parse_manifest(good.replace(old, new), source="broken.toml")
    assert key in str(caught.value)


def test_the_members_of_a_store_are_resolved_like_hosts() -> None:
    assert resolve_members(["all"], "member-2") == STORE_MEMBERS
    assert resolve_members(["leader", "follower"], "member-2") == ("member-2", "member-1")
    assert resolve_members(["follower", "leader", "member-0"], "member-0") == ("member-2", "member-0")


@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_manifest_is_refused_with_file_and_key(case: str) -> None:
    old, new, key = REFUSED[case]
    assert old in GOOD
    with pytest.raises(ConfigError, match=r"^broken\.toml: key '") as caught:
        parse_manifest(GOOD.replace(old, new), source="broken.toml")
    assert key in str(caught.value)


def test_an_unknown_key_of_the_job_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"broken\.toml, job\.config: key 'lease_ttl'"):
        parse_manifest("[job]\nconfig = { lease_ttl = 3 }", source="broken.toml")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_manifest_names_its_script_and_soak_is_the_campaign_of_its_seed(path: Path) -> None:
    manifest = load_manifest(path)
    assert (REPOSITORY / manifest.script[0]).exists()
    if path.stem == "soak":
        assert len(manifest.incidents) == SOAK_INCIDENTS
        drawn = draw_campaign(
            manifest.job, RandomCampaign(seed=manifest.seed, incidents=SOAK_INCIDENTS, gap_steps=6.0)
        )
        assert manifest.incidents == drawn.incidents, "it is not what its first line says"


@given(manifests())
def test_a_formatted_manifest_parses_as_the_same_manifest(manifest) -> None:
    assert parse_manifest(format_manifest(manifest), source="written") == manifest


@given(
    st.integers(0, MAX_NUMBER),
    st.integers(1, 60),
    st.floats(MIN_GAP_STEPS, MAX_GAP_STEPS),
    st.integers(1, 6),
    st.booleans(),
)
def test_a_random_campaign_is_a_valid_manifest_and_deterministic(seed, count, gap, hosts, has_links) -> None:
    shape = ChaosJob(hosts=hosts, network="namespaces" if has_links else "loopback")
    wanted = RandomCampaign(seed=seed, incidents=count, gap_steps=gap)
    drawn = draw_campaign(shape, wanted)
    assert draw_campaign(shape, wanted) == drawn
    assert parse_manifest(format_manifest(drawn), source="drawn") == drawn
    assert len(drawn.incidents) == count


@given(st.integers(0, 10_000), st.integers(1, 3))
def test_a_random_campaign_hits_at_most_the_tolerated_number_of_hosts_at_once(seed, tolerated) -> None:
    drawn = draw_campaign(
        ChaosJob(hosts=4), RandomCampaign(seed=seed, incidents=60, gap_steps=1.0, max_hosts_lost=tolerated)
    )
    hit: set[str] = set()
    for incident in drawn.incidents:
        hit = set(incident.target.hosts) | (hit if incident.overlaps else set())
        assert len(hit) <= tolerated + ("leader" in hit)


def test_the_causes_of_a_random_campaign_have_the_published_frequencies() -> None:
    drawn = draw_campaign(ChaosJob(hosts=4), RandomCampaign(seed=1, incidents=4000))
    total = sum(cause.count for cause in list_causes(has_links=False))
    hosts = sum(incident.target.part is TargetPart.HOST for incident in drawn.incidents) / 4000
    # Maintenance, SSD, power, chassis and IO board, and a quarter of the faults that represent broken links.
    assert abs(hosts - (32 + 10 + (35 + 7) / 4) / total) < 0.02
