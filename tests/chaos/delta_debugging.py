"""Shrinks a failing manifest to fewer incidents by delta debugging (Zeller and Hildebrandt 2002). Pure."""

import itertools
from collections.abc import Callable, Iterable, Sequence

import msgspec

from tests.chaos.invariants import Violation
from tests.chaos.manifest import CampaignManifest, Incident


def minimize_manifest(
    manifest: CampaignManifest, fails: Callable[[CampaignManifest], bool]
) -> CampaignManifest:
    """Return a manifest with a subset of the incidents that is 1-minimal: without any one of them the failure is gone.

    This is guaranteed if `fails` is deterministic; otherwise the returned manifest has failed at least once.

    Args:
        manifest: the failing manifest.
        fails: runs a manifest, and returns whether the same failure occurs.
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

    New violations do not count: without the incident that should end the job, the exit code is not the expected one.
    """
    return {violation.invariant for violation in first} <= {violation.invariant for violation in found}


def _cut(incidents: Sequence[Incident], pieces: int) -> list[Sequence[Incident]]:
    """Return `pieces` slices of nearly equal length; empty ones are left out."""
    bounds = [len(incidents) * place // pieces for place in range(pieces + 1)]
    return [incidents[a:b] for a, b in itertools.pairwise(bounds) if b > a]


def _without(cuts: Sequence[Sequence[Incident]], place: int) -> Sequence[Incident]:
    return [incident for number, cut in enumerate(cuts) if number != place for incident in cut]
