"""A process that runs a program with a cache of compiled ones: argv is the cache, a factor in the code, and a width.

It prints, as a line of JSON, whether the program had to be compiled, and what it gives.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np

from resilient_jax.jax_runtime.compile_cache import share_compilation_cache
from tests.support.null_cache_hooks import NullCacheHooks


class MissedPrograms(NullCacheHooks):
    """Keeps the names of the programs that had to be compiled."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def missed(self, key: str, seconds: float) -> None:
        self.names.append(key.rpartition("-")[0])


def main() -> None:
    factor, width = float(sys.argv[2]), int(sys.argv[3])
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    missed = MissedPrograms()
    assert share_compilation_cache(missed, 2**30) is None

    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        return jnp.tanh(x) * factor

    found = np.asarray(program(np.ones(width, np.float32)))
    print(json.dumps({"missed": "jit_program" in missed.names, "found": found.tolist()}))


if __name__ == "__main__":
    main()
