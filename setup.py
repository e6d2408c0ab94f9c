"""The packages of the wheel; everything else that setuptools needs is in pyproject.toml.

Commands run example scripts with settings and topologies (`resilient_jax/cli/bundled_files.py`). Their folders are at
the top of the source tree, where readers look for them, and inside the package in a wheel. Only `package_dir` can do
that, and pyproject.toml cannot combine it with packages that are found.
"""

from setuptools import find_namespace_packages, setup

BUNDLED = ("examples", "configs", "meshes")

setup(
    packages=[
        *find_namespace_packages(include=["resilient_jax*"]),
        *(
            f"resilient_jax.{name}"
            for folder in BUNDLED
            for name in (folder, *(f"{folder}.{below}" for below in find_namespace_packages(folder)))
        ),
    ],
    package_dir={f"resilient_jax.{folder}": folder for folder in BUNDLED},
    package_data={"": ["*.toml"]},
)
