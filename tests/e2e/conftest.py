"""One compilation cache for all jobs of a session, so that each program is compiled once."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            folder = tmp_path_factory.getbasetemp()
            if "PYTEST_XDIST_WORKER" in os.environ:
                folder = folder.parent  # the session's folder, which contains those of the pytest workers
            patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "compile-cache"))
        yield
