"""One compilation cache for all jobs of a session: what one has compiled the next one loads."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compile-cache")))
        yield
