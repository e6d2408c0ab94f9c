"""The options and arguments of `python tests/chaos`."""

from pathlib import Path
from typing import Annotated

import typer

from tests.chaos.manifest import MAX_NUMBER
from tests.chaos.random_campaigns import MAX_GAP_STEPS, MIN_GAP_STEPS

ManifestAndScript = Annotated[
    list[str] | None,
    typer.Argument(
        help="The manifest (a .toml file), then the script.", metavar="[MANIFEST] -- SCRIPT [ARGS...]"
    ),
]
CampaignOption = Annotated[
    str | None, typer.Option(help="A manifest of tests/chaos/campaigns by its name, such as process or soak.")
]
RandomOption = Annotated[
    bool, typer.Option("--random", help="Draw the incidents from published failure rates.")
]
SeedOption = Annotated[int, typer.Option(min=0, max=MAX_NUMBER, help="Seed of a random campaign.")]
IncidentsOption = Annotated[int, typer.Option(min=1, help="Incidents of a random campaign.")]
GapOption = Annotated[
    float,
    typer.Option(
        min=MIN_GAP_STEPS, max=MAX_GAP_STEPS, help="Mean steps between two incidents of a random campaign."
    ),
]
HostsOption = Annotated[int, typer.Option(min=1, max=64, help="Hosts of a random campaign's job.")]
StepsOption = Annotated[
    int,
    typer.Option(
        min=0,
        max=MAX_NUMBER,
        help="Steps that the script of a random campaign trains. 0: until the campaign asks it to stop.",
    ),
]
MaxHostsLostOption = Annotated[
    int | None,
    typer.Option(min=1, help="Hosts that a random campaign may lose at once. Default: all but one."),
]
NetworkOption = Annotated[
    bool, typer.Option("--network", help="Random campaign: hosts in network namespaces, links may fail.")
]
StoreOption = Annotated[
    str | None,
    typer.Option(
        help="An etcd cluster as the job's store: etcd://HOST:2379,HOST:2379,HOST:2379/NAMESPACE. Faults of "
        "the store are skipped: others may use it. Default: what the manifest says."
    ),
]
ShrinkOption = Annotated[
    bool,
    typer.Option(
        "--shrink", help="After a failure: find the fewest incidents that violate the same invariants."
    ),
]
RepeatOption = Annotated[
    int, typer.Option(min=1, help="Runs of each trial when shrinking: some failures are rare.")
]
RunFolderOption = Annotated[
    Path | None,
    typer.Option("--run-dir", help="Folder for logs, events, manifest. Default: a new folder in /tmp."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")]
