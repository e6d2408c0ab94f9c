"""Errors that all hosts raise: shown once, as the last output, without frames of the package. What one raises alone."""

import re
from pathlib import Path

import pytest

from tests.jobs.launched import JOBS, Ended, run_launch


def run_with(fault: str, work: Path, hosts: int = 2) -> Ended:
    ended = run_launch([str(JOBS / "faulty.py"), fault], work, hosts=hosts)
    assert ended.leftovers == []
    return ended


@pytest.mark.parametrize("fault", ["all-hosts", "in-loss"])
def test_an_exception_in_train_is_the_last_thing_the_user_sees(fault: str, tmp_path: Path) -> None:
    ended = run_with(fault, tmp_path)
    assert ended.code == 1
    assert ended.worker_starts <= 3, "what both hosts raise was tried again"
    words = ended.last_words
    assert words.startswith("the job ended: user_error on host-"), ended.output
    assert words.rstrip().endswith("ValueError: bad batch at step 5"), ended.output
    assert words.count("Traceback (most recent call last)") == 1
    assert words.count("bad batch at step") == 2, "the message, and the source line that raised it"
    assert 'raise ValueError(f"bad batch at step {step}")' in words
    assert words.count("/faulty.py") == ended.output.count('File "'), "a frame that is not of the script"
    assert words.splitlines()[2].endswith(", in <module>"), "not from the first line of the script on"
    assert ended.output.count("Traceback") == 1, ended.output


def test_a_host_whose_script_fails_alone_each_time_does_not_end_the_job(tmp_path: Path) -> None:
    ended = run_with("one-host", tmp_path)
    assert ended.code == 0, ended.output
    assert "the job ended" not in ended.output
    log = (tmp_path / "host-1.log").read_text()
    assert "resilient_jax/worker/run.py" in log
    assert "ValueError: bad batch at step 5" in log


def test_the_exit_code_of_the_script_is_that_of_the_job(tmp_path: Path) -> None:
    ended = run_with("exit-7", tmp_path, hosts=1)
    assert ended.code == 7, ended.output
    assert ended.last_words.startswith("the job ended: user_error on host-")
    assert "the script exited with code 7 and wrote nothing to standard error" in ended.last_words


def test_a_second_run_in_a_process_is_refused(tmp_path: Path) -> None:
    ended = run_with("twice", tmp_path, hosts=1)
    assert "run: found a second call in a process that an agent started, expected one" in ended.output


def test_an_exception_at_import_time_ends_the_job(tmp_path: Path) -> None:
    ended = run_with("import", tmp_path)
    assert ended.code == 1
    assert ended.last_words.rstrip().endswith(
        "ModuleNotFoundError: No module named 'a_module_that_nobody_has'"
    ), ended.output
    assert ended.output.count("Traceback (most recent call last)") == 1, "not once for each host"
    assert ended.last_words.startswith("the job ended: user_error on host-"), ended.output


def test_a_wrong_argument_is_shown_with_the_line_of_the_script_alone(tmp_path: Path) -> None:
    ended = run_with("wrong-argument", tmp_path)
    assert ended.code == 1
    words = ended.last_words.splitlines()
    assert words[0].startswith("the job ended: user_error on host-"), ended.output
    frames = [line for line in ended.output.splitlines() if 'File "' in line]
    assert [line.rpartition("/")[2].partition(",")[0] for line in frames] == ['faulty.py"']
    assert words[-1].startswith("resilient_jax.errors.CallerError: run: found 7 (int)"), ended.output


def test_a_traceback_that_the_script_prints_and_survives_is_on_the_screen(tmp_path: Path) -> None:
    ended = run_with("printed", tmp_path)
    assert ended.code == 0, ended.output
    for host in ("host-0", "host-1"):
        assert f"[{host}] ValueError: bad batch at step 5" in ended.output


def test_arrays_made_before_run_are_refused_with_what_to_do(tmp_path: Path) -> None:
    ended = run_with("early", tmp_path)
    assert ended.worker_starts == 2
    assert "run: found that this script has used JAX's devices already" in ended.last_words
    assert "Make arrays inside `train`" in ended.last_words


def test_a_script_that_never_calls_run_is_refused_with_what_to_do(tmp_path: Path) -> None:
    ended = run_with("no-run", tmp_path, hosts=1)
    assert ended.code == 2
    assert "the script ended before rj.run(...) had returned; call rj.run(train) in it" in ended.last_words


def test_a_collective_that_fails_without_a_death_ends_the_job_after_some_retries(tmp_path: Path) -> None:
    ended = run_with("collective", tmp_path)
    assert ended.code == 1
    # All hosts fail; if most of the failures were reported by the one that does not lead, it is taken out first.
    found = re.search(
        r"in a row at step 5 although no host died(, also without host-\d)?; the last error:",
        ended.last_words,
    )
    assert found is not None, ended.output
    assert ended.last_words.rstrip().endswith(
        "JaxRuntimeError: INTERNAL: Gloo all-reduce failed: connection reset"
    )
    assert ended.worker_starts == 2
