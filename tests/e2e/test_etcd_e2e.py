"""A job whose store is an etcd cluster, under the loss of members of the cluster and of parts of the job."""

import json
import subprocess
from pathlib import Path

import pytest
from agents import COMMAND
from etcd_needed import needs_etcd

CAMPAIGN_S = 300
INCIDENTS = 10

pytestmark = [needs_etcd, pytest.mark.timeout(CAMPAIGN_S + 20)]


def test_a_job_survives_the_loss_of_members_of_its_store_of_the_majority_and_of_its_own_parts_meanwhile(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [*COMMAND, "chaos", "--json", "--campaign", "etcd", "--run-dir", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=CAMPAIGN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["violations"] == 0, done.stderr
    assert figures["incidents"] + figures["skipped"] == INCIDENTS, done.stderr
