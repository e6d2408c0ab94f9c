"""The trainer in a real job whose first host is killed: the same bits as on one machine that nobody disturbed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resilient_jax.errors import ExitCode
from resilient_jax.protocol.fault_points import Place
from resilient_jax.world.inspection import Part
from resilient_jax.world.local_job import LocalJob

JOB = Path(__file__).with_name("trainer_job.py")
DEADLINE_S = 150.0
CONFIG = "restart_limit = 10\nrestart_backoff_s = 0.0\n"


def launch(work, *words, hosts):
    work.mkdir(exist_ok=True)
    (work / "job.toml").write_text(CONFIG)
    return LocalJob(
        [str(JOB), str(work), *words],
        hosts=hosts,
        run_directory=work / "run",
        options=["--config", str(work / "job.toml"), "--devices-per-host", "2"],
        environment={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What one machine alone says in the end."""
    done = subprocess.run(
        [sys.executable, str(JOB), str(tmp_path_factory.mktemp("alone"))],
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
    return done.stdout.strip()


@pytest.mark.parametrize("place", [Place.BEFORE_SUM, Place.AFTER_COMMIT])
def test_the_weights_are_bit_for_bit_those_of_an_undisturbed_run(place, undisturbed, tmp_path):
    with launch(tmp_path, hosts=3) as job:
        job.hold(place, ["host-0"], 6)
        job.wait_held(["host-0"], DEADLINE_S)
        job.kill(Part.WORKER, "host-0")
        job.release()
        assert job.wait(DEADLINE_S) == 0, job.tail()
        found = re.findall(r"step 14 digest \w{64}", job.output())
    assert found, job.output()
    assert set(found) == {undisturbed}


def test_a_number_that_is_not_finite_ends_the_job_with_step_microbatch_and_host(tmp_path):
    with launch(tmp_path, "nan", hosts=2) as job:
        assert job.wait(DEADLINE_S) != ExitCode.DONE
        said = job.output()
    assert re.search(r"NonFiniteError: step 4: found .* in the microbatches 5 \(host host-[01]\)", said), said
