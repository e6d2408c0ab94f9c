"""Finds the example scripts, settings and topologies that commands use, in a wheel or in a checkout."""

import importlib.resources
from pathlib import Path

from resilient_jax.errors import CallerError


def find_bundled_file(path: str) -> Path:
    """Return a file below `examples`, `configs` or `meshes`.

    A wheel has these folders inside the package (see `pyproject.toml`), a checkout beside the package. In both they are
    neighbors, so paths between them such as `../meshes/local_4x2.toml` are valid.

    Raises:
        CallerError: neither place has the file.
    """
    package = Path(str(importlib.resources.files("resilient_jax")))
    for root in (package, package.parent):
        if (root / path).is_file():
            return root / path
    raise CallerError(
        f"{path}: found no such file in {package} or beside it; expected one of the package's examples, configs or "
        "meshes. Check the name"
    )
