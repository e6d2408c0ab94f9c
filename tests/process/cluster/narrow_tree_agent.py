"""`resilient-jax agent` in a job where two hosts report to one agent, so that a few hosts make a tree of two levels.

It prints "parent: ENDPOINT" whenever it has reported and has a parent.
"""

from unittest import mock

from resilient_jax.cli.main import main
from resilient_jax.cluster import progress_relay, progress_tree
from resilient_jax.cluster.progress_relay import ProgressRelay
from resilient_jax.transport.channel import Channel

REPORT = ProgressRelay._report


async def report_and_print(relay: ProgressRelay, channel: Channel) -> None:
    await REPORT(relay, channel)
    if relay.parent:
        print(f"parent: {relay.parent}", flush=True)


if __name__ == "__main__":
    with (
        mock.patch.object(progress_tree, "FANOUT", 2),
        mock.patch.object(progress_relay, "FANOUT", 2),
        mock.patch.object(ProgressRelay, "_report", report_and_print),
    ):
        main()
