"""What a worker's script consists of, item by item, so that hosts which run different ones are told apart by name."""

import hashlib
import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

import jax

from resilient_jax.worker.imported_modules import list_installed_folders
from resilient_jax.worker.kept_imports import find_kept_file

LIBRARIES: Final = ("flax", "optax", "orbax-checkpoint", "numpy")
"""What computes, beside the libraries whose versions are compared before a worker is started."""
JAX_OPTIONS: Final = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
)
"""What changes the numbers that a program computes."""
DIGEST_CHARACTERS: Final = 16


def describe_script() -> dict[str, str]:
    """Return what hosts of a job must have in common, by name: values, and digests of files.

    Items are the arguments, the script, each module that it has imported so far from outside of Python's own folders,
    the versions of libraries, and the options of JAX that change results. Of a package that is installed only the
    version counts; of a file that the job has kept the copy, which is what was imported. Takes some milliseconds.
    """
    found = {"arguments": repr(sys.argv[1:])}
    for name in LIBRARIES:
        try:
            found[f"version of {name}"] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[f"version of {name}"] = "not installed"
    for name in JAX_OPTIONS:
        found[f"option {name}"] = str(getattr(jax.config, name, None))
    installed = list_installed_folders()
    for name, module in sorted(sys.modules.items()):
        file = _find_file(module)
        if file is None:
            continue
        kept, path = find_kept_file(name, file), Path(file).resolve()
        if kept is None and any(folder in path.parents for folder in installed):
            continue
        digest = kept.digest[:DIGEST_CHARACTERS] if kept is not None else _digest_file(path)
        if digest:
            found["script" if name == "__main__" else f"module {name}"] = digest
    return found


def _find_file(module: ModuleType | None) -> str | None:
    # From the dict: some modules answer to any attribute, or import others when they are asked for one.
    name = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return name if isinstance(name, str) else None


def _digest_file(path: Path) -> str:
    """Return a digest of the file's bytes; empty if it is gone, or cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST_CHARACTERS]
    except OSError:
        return ""
