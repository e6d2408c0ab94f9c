"""The fewest incidents of a failing manifest that fail alike: delta debugging (Zeller and Hildebrandt 2002). Pure."""

import itertools
from collections.abc import Callable, Iterable, Sequence

import msgspec

from resilient_jax.chaos.invariants import Violation
from resilient_jax.chaos.manifest import CampaignManifest, Incident


def minimize_manifest(
    manifest: CampaignManifest, fails: Callable[[CampaignManifest], bool]
) -> CampaignManifest:
    """A manifest with some of the incidents, of which none can be left out.

    That holds if `fails` gives the same answer each time; of failures that come and go it gives some that has failed.

    Args:
        manifest: that fails.
        fails: runs a manifest, and says whether it fails as this one did.
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
    """Whether all invariants that `first` violates are violated again.

    Any other would not do: a job without the incident that it was to fail by violates the promise of its ending.
    """
    return {violation.invariant for violation in first} <= {violation.invariant for violation in found}


def _cut(incidents: Sequence[Incident], pieces: int) -> list[Sequence[Incident]]:
    """About equal pieces, none empty."""
    bounds = [len(incidents) * place // pieces for place in range(pieces + 1)]
    return [incidents[a:b] for a, b in itertools.pairwise(bounds) if b > a]


def _without(cuts: Sequence[Sequence[Incident]], place: int) -> Sequence[Incident]:
    return [incident for number, cut in enumerate(cuts) if number != place for incident in cut]
