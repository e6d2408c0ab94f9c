"""Delta debugging shrinks a failing manifest to the incidents that cause the failure."""

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.delta_debugging import minimize_manifest
from tests.chaos.manifest import CampaignManifest
from tests.pure.chaos.numbered_incidents import numbered, steps_of


@given(st.data(), st.integers(1, 40))
def test_a_shrunk_manifest_has_exactly_the_incidents_that_cause_the_failure(data, count) -> None:
    culprits = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=5))
    tried: list[CampaignManifest] = []

    def fails(manifest: CampaignManifest) -> bool:
        tried.append(manifest)
        return culprits <= steps_of(manifest)

    smallest = minimize_manifest(numbered(count), fails)
    assert steps_of(smallest) == culprits
    assert len(tried) <= count**2 + 3 * count  # the algorithm's bound


def test_a_single_cause_among_64_incidents_is_found_in_12_trials() -> None:
    tries = 0

    def fails(manifest: CampaignManifest) -> bool:
        nonlocal tries
        tries += 1
        return 17 in steps_of(manifest)

    assert steps_of(minimize_manifest(numbered(64), fails)) == {17}
    assert tries <= 12


def test_shrinking_keeps_the_order_of_incidents() -> None:
    smallest = minimize_manifest(numbered(10), lambda manifest: {2, 7} <= steps_of(manifest))
    assert [incident.trigger.step for incident in smallest.incidents] == [2, 7]
