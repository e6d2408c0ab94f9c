"""Manifests whose incidents are identified by a number, the step of their trigger."""

from tests.chaos.faults import ProcessKill
from tests.chaos.manifest import CampaignManifest, FaultTarget, Incident, TargetPart, Trigger


def numbered(count: int) -> CampaignManifest:
    """Return a manifest with incidents at the steps 0 to `count` - 1."""
    return CampaignManifest(
        incidents=tuple(
            Incident(
                trigger=Trigger(step=number), target=FaultTarget(part=TargetPart.WORKER), fault=ProcessKill()
            )
            for number in range(count)
        )
    )


def steps_of(manifest: CampaignManifest) -> set[int]:
    return {incident.trigger.step or 0 for incident in manifest.incidents}
