"""The trainer with its state sharded over real hosts: the bits of a complete state, and nobody has all of it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resilient_jax.world.local_job import LocalJob

JOB = Path(__file__).with_name("sharded_job.py")
DEADLINE_S = 240.0
STEPS, REPORTS = 9, 12
"""Reports: of each step, and of three evaluations."""


def said_in(output):
    """Every step's metrics, to the last digit, and the digest of the final variables."""
    return set(re.findall(r"step \d+ (?:digest \w{64}|\[.*\])", output))


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """What one machine says that has the whole state."""
    work = tmp_path_factory.mktemp("alone")
    done = subprocess.run(
        [sys.executable, str(JOB), str(work), "complete"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        },
    )
    assert done.returncode == 0, done.stderr
    return said_in(done.stdout)


@pytest.mark.parametrize("hosts", [2, 3])
def test_a_sharded_state_has_the_bits_of_a_complete_one_and_each_host_has_its_share(
    hosts, complete, tmp_path
):
    job = LocalJob(
        [str(JOB), str(tmp_path), "sharded"],
        hosts=hosts,
        run_directory=tmp_path / "run",
        options=["--devices-per-host", "2"],
        environment={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with job:
        assert job.wait(DEADLINE_S) == 0, job.tail()
        found = said_in(job.output())
    assert len(complete) == REPORTS + 1
    assert found == complete
    for host in range(hosts):
        shares = [line.split() for line in (tmp_path / f"shares.{host}").read_text().splitlines()]
        assert len(shares) == REPORTS
        for _, here, whole, complete_arrays in shares:
            assert int(here) * hosts == int(whole)
            assert int(complete_arrays) == 0
