"""Shrinks a failing manifest to fewer incidents by delta debugging (Zeller and Hildebrandt 2002). Pure."""

import itertools
from collections.abc import Callable, Iterable, Sequence

import msgspec

from resilient_jax.chaos.invariants import Violation
from resilient_jax.chaos.manifest import CampaignManifest, Incident


def minimize_manifest(
    manifest: CampaignManifest, fails: Callable[[CampaignManifest], bool]
) -> CampaignManifest:
    """Return a manifest with some of the incidents, none of which can be left out.

    This holds if `fails` gives the same answer each time; for a failure that is not deterministic the returned manifest
    has failed once.

    Args:
        manifest: the one that fails.
        fails: runs a manifest, and returns whether it fails in the same way.
    """

    def of(incidents: Sequence[Incident]) -> CampaignManifest:
        return msgspec.structs.replace(manifest, incidents=tuple(incidents))

    kept: Sequence[Incident] = manifest.incidents
    pieces = 2
    while len(kept) >= 2:
        cuts = _cut(kept, pieces)
        smaller = next((cut for cut in cuts if len(cut) < len(kept) and fails(of(cut))), None)
        if smaller is not None:
            kept, pieces = smaller, 2
            continue
        rests = [_without(cuts, place) for place in range(len(cuts))] if pieces > 2 else []
        smaller = next((rest for rest in rests if fails(of(rest))), None)
        if smaller is not None:
            kept, pieces = smaller, max(pieces - 1, 2)
            continue
        if pieces >= len(kept):
            break
        pieces = min(2 * pieces, len(kept))
    return of(kept)


def is_same_failure(found: Iterable[Violation], first: Iterable[Violation]) -> bool:
    """Return whether all invariants that `first` violates are violated again.

    Another invariant does not count: a job without the incident that was to end it violates the expected exit code.
    """
    return {violation.invariant for violation in first} <= {violation.invariant for violation in found}


def _cut(incidents: Sequence[Incident], pieces: int) -> list[Sequence[Incident]]:
    """Return about equal pieces, none of them empty."""
    bounds = [len(incidents) * place // pieces for place in range(pieces + 1)]
    return [incidents[a:b] for a, b in itertools.pairwise(bounds) if b > a]


def _without(cuts: Sequence[Sequence[Incident]], place: int) -> Sequence[Incident]:
    return [incident for number, cut in enumerate(cuts) if number != place for incident in cut]
