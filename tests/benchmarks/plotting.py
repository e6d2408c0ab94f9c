"""Plots of benchmarks, drawn by scripts in processes of their own: no command loads matplotlib."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec

from resilient_jax.errors import CallerError, InternalError
from tests.benchmarks.runs import ERROR_CHARACTERS, RUN_TIMEOUT_S, script_environment


def check_can_plot(path: Path) -> None:
    """Check, before a long run, that its result can be plotted.

    Raises:
        CallerError: matplotlib is missing, the folder is missing, or the suffix is not `.png`.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise CallerError(
            f"--plot {path}: found no matplotlib in this Python, expected it: pip install 'resilient_jax[plot]'"
        )
    if path.suffix != ".png" or not path.absolute().parent.is_dir():
        raise CallerError(
            f"--plot {path}: found no such folder, or another suffix; expected a path to a .png file"
        )


def run_plot_script(script: Path, data: msgspec.Struct, work: Path, path: Path) -> None:
    """Run a script that draws a plot.

    Args:
        script: its arguments are the path of a file with `data` as JSON, and `path`.
        data: what the script draws.
        work: folder for the file with the data.
        path: of the plot.

    Raises:
        InternalError: the script failed.
    """
    written = work / "picture.json"
    written.write_bytes(msgspec.json.encode(data))
    done = subprocess.run(
        [sys.executable, str(script), str(written), str(path)],
        env=script_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise InternalError(
            f"{script}: found exit code {done.returncode}:\n{done.stderr[-ERROR_CHARACTERS:]}"
        )
