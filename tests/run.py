"""`python tests/run.py TIER...`: run tiers of the suite one after the other, and say what each took.

`make test`, `make test-jobs` and `make test-all` call it. Each tier is a pytest of its own, so that what one imports
is no part of another. With `--full`: also what is marked `full`, and hundreds of new examples for each property.
"""

import argparse
import dataclasses
import heapq
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from resilient_jax.cluster.child_process import bind_to_this_process
from tests.support.durations import write_durations
from tests.support.paths import ROOT
from tests.support.patience import measure_slowness, patience
from tests.support.tiers import TIERS, Tier

CACHE: Final = ROOT / ".cache" / "tests"
REPORTS: Final = CACHE / "reports"
SEEDS: Final = CACHE / "failed-seeds.txt"
MAX_CACHE_AGE_S: Final = 14 * 86400.0
SILENCE_S: Final = 120.0
"""Within so long some test ends, on an idle machine. Ten times as long without a word, and the tier hangs in C code,
where no time-out of a test reaches it."""
NEXT: Final = {
    "make test": "make test-jobs: real jobs, broken in each way (26 minutes); make test-all: everything",
    "make test-jobs": "make test-all: all places x all deaths, campaigns, etcd, mutations of the code (hours)",
}
FILES_SHOWN: Final = 40
A_FILE_STAYS_TOGETHER: Final = ("--dist", "loadfile", "--no-loadscope-reorder")
"""The tests of a file share its job. The files begin in the order of `tests/conftest.py`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a tier.

    Attributes:
        tier: the tier.
        code: of pytest.
        took_s: in seconds of the wall clock.
        cases: how many passed, failed, or were skipped.
        failed: the names of those that failed.
        seconds: by file, in seconds of all pytest processes.
    """

    tier: Tier
    code: int
    took_s: float
    cases: Counter[str]
    failed: tuple[str, ...]
    seconds: dict[str, float]


def main() -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tiers", nargs="+", choices=[tier.name for tier in TIERS], metavar="TIER")
    parser.add_argument("--full", action="store_true", help="what only `make test-all` runs, too")
    parser.add_argument("--seed", type=int, help="of drawn examples; default: a new one")
    parser.add_argument(
        "--record", action="store_true", help="keep what each file takes in tests/durations.json"
    )
    parser.add_argument("--said-by", default="", help="the command that a person typed")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that pytest and its processes end, too
    REPORTS.mkdir(parents=True, exist_ok=True)
    drop_old_programs()
    seed = arguments.seed if arguments.seed is not None else random.randrange(2**31)
    if arguments.full:
        print(f"examples are drawn with seed {seed}", flush=True)
    began_s, slow = time.monotonic(), measure_slowness()
    outcomes = []
    for name in arguments.tiers:
        tier = next(tier for tier in TIERS if tier.name == name)
        outcomes.append(run_tier(tier, seed if arguments.full else None))
    if arguments.full:
        report_files(outcomes)
    if arguments.record:
        write_durations({path: s for outcome in outcomes for path, s in outcome.seconds.items()})
    report(outcomes, time.monotonic() - began_s, slow, arguments.said_by)
    failed = [name for outcome in outcomes for name in outcome.failed]
    if arguments.full and failed:
        with SEEDS.open("a") as file:
            print(f"{time.strftime('%Y-%m-%d %H:%M')} --seed {seed}: {', '.join(failed)}", file=file)
    return int(not all(map(is_green, outcomes)))


TESTS_FAILED: Final = 1


def is_green(outcome: Outcome) -> bool:
    """Return whether all tests of a tier passed, and there were some."""
    return outcome.code == 0


def count_workers(tier: Tier) -> int:
    """Return how many tests run at a time: jobs wait about as long as they compute, and have many processes."""
    cores = len(os.sched_getaffinity(0))
    return max(2, cores // 2) if tier.has_jobs else max(2, cores)


def run_tier(tier: Tier, seed: int | None) -> Outcome:
    """Run the tests of a tier; a tier that hangs is ended."""
    print(f"\n=== {tier.name}: {tier.what} ===", flush=True)
    report_path = REPORTS / f"{tier.name.replace('/', '-')}.xml"
    report_path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", str(tier.folder), "-q", "-n", str(count_workers(tier))]
    command += [*A_FILE_STAYS_TOGETHER, f"--junitxml={report_path}"]
    command += [] if seed is None else ["--full", f"--hypothesis-seed={seed}"]
    began_s = time.monotonic()
    code = run_watched(command)
    took_s = time.monotonic() - began_s
    cases, failed, seconds = read_report(report_path)
    return Outcome(tier=tier, code=code, took_s=took_s, cases=cases, failed=failed, seconds=seconds)


def run_watched(command: Sequence[str]) -> int:
    """Run a pytest, passing on what it prints; end it when it says nothing for too long."""
    process = subprocess.Popen(
        bind_to_this_process(command),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    heard_s = time.monotonic()
    try:
        while process.poll() is None:
            if said := process.stdout.read():
                heard_s = time.monotonic()
                sys.stdout.buffer.write(said)
                sys.stdout.flush()
            elif time.monotonic() - heard_s > patience(SILENCE_S):
                print("\nno test has ended for too long: this tier hangs, and is ended", flush=True)
                end_group(process)
            time.sleep(0.1)
        sys.stdout.buffer.write(process.stdout.read() or b"")
        sys.stdout.flush()
    finally:
        if process.poll() is None:
            end_group(process)
    return process.returncode


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a pytest and its workers; the jobs that they run end with them."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_report(path: Path) -> tuple[Counter[str], tuple[str, ...], dict[str, float]]:
    """Return the number of cases by outcome, the names of those that failed, and the seconds of each file."""
    cases: Counter[str] = Counter()
    seconds: dict[str, float] = defaultdict(float)
    failed: list[str] = []
    if not path.exists():  # pytest was ended
        return cases, (), seconds
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        kind = "skipped" if kinds == {"skipped"} else "failed" if kinds else "passed"
        cases[kind] += 1
        file = find_file(case.get("classname", ""))
        seconds[file] += float(case.get("time", 0))
        if kind == "failed":
            failed.append(f"{file}::{case.get('name')}")
    return cases, tuple(failed), seconds


def find_file(module: str) -> str:
    """Return the path of a test's file from the name that the report has for it, which may end with a class."""
    parts = module.split(".")
    while parts and not (ROOT / "/".join(parts)).with_suffix(".py").exists():
        parts.pop()
    return "/".join(parts) + ".py" if parts else module


def report_files(outcomes: Iterable[Outcome]) -> None:
    """Print what the files took that took longest."""
    seconds = {path: s for outcome in outcomes for path, s in outcome.seconds.items()}
    print(f"\nseconds by file, the {FILES_SHOWN} longest of {len(seconds)}")
    for path, took_s in heapq.nlargest(FILES_SHOWN, seconds.items(), key=itemgetter(1)):
        print(f"{took_s:8.1f}  {path}")


def report(outcomes: Sequence[Outcome], took_s: float, slow: float, said_by: str) -> None:
    """Print what each tier took, what failed, and how to go on."""
    print(f"\n{'tier':18} {'took':>7} {'budget':>7}  cases")
    for outcome in outcomes:
        cases = ", ".join(f"{count} {kind}" for kind, count in sorted(outcome.cases.items())) or "no report"
        print(f"{outcome.tier.name:18} {outcome.took_s:5.0f} s {outcome.tier.budget_s:5.0f} s  {cases}")
    for outcome in outcomes:
        for name in outcome.failed:
            print(f"FAILED {name}")
    cores = len(os.sched_getaffinity(0))
    result = "all green" if all(map(is_green, outcomes)) else "NOT GREEN"
    print(
        f"\n{result}: {took_s / 60:.1f} minutes on {cores} cores, "
        f"{slow:.1f} times as slow as an idle machine when it began"
    )
    if said_by in NEXT:
        print(f"next: {NEXT[said_by]}")
    # As pytest ends: what reads logs looks for such a line.
    total = sum((outcome.cases for outcome in outcomes), Counter())
    # Of a tier that was ended, or could not begin, no case has failed.
    total["error"] = sum(not is_green(outcome) and outcome.code != TESTS_FAILED for outcome in outcomes)
    order = ("failed", "error", "passed", "skipped")
    counts = ", ".join(f"{total[kind]} {kind}" for kind in order if total[kind])
    print(f"===== {counts or 'no tests ran'} in {took_s:.2f}s =====", flush=True)


def drop_old_programs() -> None:
    """Remove compiled programs of earlier runs that none has used for long."""
    newest_s = time.time() - MAX_CACHE_AGE_S
    for path in CACHE.glob("jaxlib-*/*"):
        if path.stat().st_mtime < newest_s:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
