"""`resilient-jax doctor` for real: its experiments on CPU, what it says when they fail, and that it leaves nothing."""

import json
import os
import signal
import subprocess
import sys

import psutil

from resilient_jax.doctor.check_result import CheckVerdict
from resilient_jax.doctor.experiments import Experiments
from resilient_jax.errors import ExitCode
from tests.support.patience import patience, wait_until

COMMAND = [sys.executable, "-m", "resilient_jax.cli.main", "doctor", "--json", "--platform", "cpu"]
DEADLINE_S = patience(10)
EXPERIMENTS = ["world", "collective abort", "rejoin", "live nodes", "clear_backends"]


def test_the_doctor_finds_that_the_experiments_work_on_this_machine() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    found = json.loads(done.stdout)
    assert found["platform"] == "cpu"
    by_name = {result["name"]: result for result in found["results"] if result["group"] == "experiments"}
    assert list(by_name) == EXPERIMENTS
    assert [result for result in by_name.values() if result["verdict"] not in ("ok", "warning")] == []
    for name in ("collective abort", "live nodes", "rejoin"):
        assert by_name[name]["figures"]["seconds"] > 0
    memory = by_name["clear_backends"]["figures"]
    assert memory["held_mib"] - memory["left_mib"] > 90
    groups = {result["group"] for result in found["results"]}
    assert groups == {"versions", "GPUs", "environment", "limits", "network", "experiments"}
    problems = [result for result in found["results"] if result["verdict"] == "problem"]
    assert done.returncode == (1 if problems else 0), (problems, done.stderr)
    (flags,) = (result for result in found["results"] if result["name"] == "flags known to XLA")
    assert flags["verdict"] == "ok", "this jaxlib knows what GPU workers are given"


def test_a_doctor_that_is_ended_by_ctrl_c_leaves_no_process() -> None:
    with subprocess.Popen(COMMAND, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        children: list[psutil.Process] = []

        def are_experiments_on() -> bool:
            children[:] = psutil.Process(process.pid).children(recursive=True)
            return sum("experiment_process" in " ".join(read_command(child)) for child in children) >= 2

        wait_until("all experiments run", are_experiments_on)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(DEADLINE_S) == ExitCode.INTERRUPTED
        wait_until("their end", lambda: not any(child.is_running() for child in children))


def test_experiments_on_a_machine_where_no_world_can_be_formed_end_with_the_reason() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_no_such_flag=1"}
    world, *others = Experiments("cpu", ["0", "1"], environment).run()
    assert world.verdict is CheckVerdict.PROBLEM
    assert "ended with exit code" in world.found
    assert world.remedy
    assert {(result.verdict, result.found) for result in others} == {
        (CheckVerdict.NOT_RUN, "no world could be formed")
    }
    assert psutil.Process().children(recursive=True) == []


def read_command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
