"""Example scripts, settings and topologies that commands use, found in a wheel as well as in a checkout."""

import importlib.resources
from pathlib import Path

from resilient_jax.errors import CallerError


def find_bundled_file(path: str) -> Path:
    """Return a file below `examples`, `configs` or `meshes`.

    A wheel has these folders inside the package (see `pyproject.toml`), a checkout beside it. Either way they are
    neighbors, so that paths between them such as `../meshes/local_4x2.toml` hold.

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
