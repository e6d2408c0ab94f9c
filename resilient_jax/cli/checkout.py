"""Demo and benchmarks run scripts that are part of the source tree, not of the installed package."""

from pathlib import Path

from resilient_jax.errors import CallerError


def find_in_checkout(path: str) -> Path:
    """A file of the source tree.

    Raises:
        CallerError: the package is installed without it.
    """
    found = Path(__file__).parents[2] / path
    if not found.exists():
        raise CallerError(
            f"{found}: found no such file; this command runs files of the source tree. Use it from a checkout, "
            "installed with `pip install -e .`"
        )
    return found
