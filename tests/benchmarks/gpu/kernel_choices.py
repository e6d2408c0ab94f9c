"""What it costs that XLA chooses kernels by rules, and not by timing them: without that, bits differ."""

import json
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from resilient_jax.jax_runtime.worker_environment import GPU_XLA_FLAGS
from tests.benchmarks.paths import JOBS
from tests.benchmarks.runs import run_alone

OURS: Final = "deterministic, without Triton: a worker's"
CHOICES: Final = {
    "autotuned": "",
    "deterministic": "--xla_gpu_deterministic_ops=true",
    OURS: " ".join(f"{name}={value}" for name, value in GPU_XLA_FLAGS.items()),
}
"""Flags of XLA by name; the first is what the others are compared with."""
ROUNDS: Final = 2
"""Processes of each, in turn: two of the same choice show whether bits are equal."""


def measure_kernel_choices(work: Path, console: Console) -> dict[str, float]:
    """Return the step time of each choice, relative to that of the first; print a table."""
    times: dict[str, list[float]] = {name: [] for name in CHOICES}
    digests: dict[str, set[str]] = {name: set() for name in CHOICES}
    for number in range(ROUNDS):
        for place, (name, flags) in enumerate(CHOICES.items()):
            result = work / f"kernels-{number}-{place}.json"
            environment = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cuda"}
            run_alone([str(JOBS / "gpu_step.py"), str(result)], work, environment)
            found = json.loads(result.read_text())
            times[name] += found["steps_s"]
            digests[name].add(found["digest"])
    first = min(times[next(iter(CHOICES))])
    table = Table(title="A step of a bfloat16 transformer of 180 million parameters, one process")
    for column in ("kernels", "fastest", "slowest", "relative", "bits of two processes"):
        table.add_column(column)
    for name, values in times.items():
        bits = "equal" if len(digests[name]) == 1 else "differ"
        row = (
            f"{min(values) * 1e3:.1f} ms",
            f"{max(values) * 1e3:.1f} ms",
            f"{min(values) / first:.2f}",
            bits,
        )
        table.add_row(name, *row)
    console.print(table)
    return {name: min(values) / first for name, values in times.items()}
