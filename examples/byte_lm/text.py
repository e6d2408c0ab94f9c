"""Real text that every machine has: the sources of Python's own standard library."""

import sysconfig
from pathlib import Path

import numpy as np
import numpy.typing as npt

from resilient_jax.errors import ConfigError

Bytes = npt.NDArray[np.uint8]

LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Folders that are not the library itself: installed packages and tests."""


def read_standard_library(max_bytes: int) -> Bytes:
    """Return the first `max_bytes` of the library's sources, in the order of their paths.

    The result is the same on hosts with the same Python build. Hosts with different builds would train on different
    text, so give all hosts one image.

    Raises:
        ConfigError: this Python came without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    missing = max_bytes
    for path in sorted(root.rglob("*.py")):
        if missing <= 0:
            break
        if LEFT_OUT.isdisjoint(path.relative_to(root).parts):
            parts.append(path.read_bytes()[:missing])
            missing -= len(parts[-1])
    if not any(parts):
        raise ConfigError(
            f"{root}: found no Python sources, expected the standard library's. "
            "Run this example with a Python that has them."
        )
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def draw_microbatch(text: Bytes, key: tuple[int, int, int], *, sequences: int, context: int) -> Bytes:
    """Return one microbatch: random stretches of the text, each one byte longer than the context.

    A pure function of its arguments, with the same result on every host and in every release: it uses the raw output of
    Philox, which numpy promises never to change (NEP 19), not a method of `Generator`.

    Args:
        text: uint8[n] with n > context.
        key: (seed, step, index of the microbatch), each below 2**32.
        sequences: the number of stretches.
        context: the length of the inputs.

    Returns:
        uint8[sequences, context + 1]. Inputs are `[:, :-1]`, targets `[:, 1:]`.
    """
    bits = np.random.Philox(np.random.SeedSequence(key)).random_raw(sequences)
    starts = bits % np.uint64(len(text) - context)
    return text[starts[:, None] + np.arange(context + 1, dtype=np.uint64)]
