"""Manifests of incidents that can be told apart."""

from resilient_jax.chaos.faults import Kill
from resilient_jax.chaos.manifest import Incident, Manifest, Target, TargetPart, Trigger


def numbered(count: int) -> Manifest:
    """Incidents that differ."""
    return Manifest(
        incidents=tuple(
            Incident(at=Trigger(step=number), target=Target(part=TargetPart.WORKER), fault=Kill())
            for number in range(count)
        )
    )


def steps_of(manifest: Manifest) -> set[int]:
    return {incident.at.step or 0 for incident in manifest.incidents}
