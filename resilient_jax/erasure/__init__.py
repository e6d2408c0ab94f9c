"""Reed-Solomon erasure code over GF(2^8) on buffers of bytes: parity, lost shards and checksums.

See README.md in this folder. The import loads neither jax nor numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient_jax.erasure.buffers import Buffer as Buffer
    from resilient_jax.erasure.checksum import Checksum as Checksum
    from resilient_jax.erasure.checksum import ChecksumName as ChecksumName
    from resilient_jax.erasure.checksum import choose_checksum as choose_checksum
    from resilient_jax.erasure.decoding import decode as decode
    from resilient_jax.erasure.encoding import encode as encode
    from resilient_jax.erasure.errors import ErasureCodeError as ErasureCodeError
    from resilient_jax.erasure.errors import KernelSelfTestFailed as KernelSelfTestFailed
    from resilient_jax.erasure.errors import KernelUnavailable as KernelUnavailable
    from resilient_jax.erasure.errors import TooManyErasures as TooManyErasures
    from resilient_jax.erasure.kernel import Kernel as Kernel
    from resilient_jax.erasure.kernel import KernelName as KernelName
    from resilient_jax.erasure.reed_solomon import ReedSolomon as ReedSolomon
    from resilient_jax.erasure.self_test import run_self_test as run_self_test

_HOME = {
    "Buffer": "buffers",
    "Checksum": "checksum",
    "ChecksumName": "checksum",
    "ErasureCodeError": "errors",
    "Kernel": "kernel",
    "KernelUnavailable": "errors",
    "KernelName": "kernel",
    "KernelSelfTestFailed": "errors",
    "ReedSolomon": "reed_solomon",
    "TooManyErasures": "errors",
    "run_self_test": "self_test",
    "choose_checksum": "checksum",
    "decode": "decoding",
    "encode": "encoding",
}

__all__ = [
    "Buffer",
    "Checksum",
    "ChecksumName",
    "ErasureCodeError",
    "Kernel",
    "KernelName",
    "KernelSelfTestFailed",
    "KernelUnavailable",
    "ReedSolomon",
    "TooManyErasures",
    "choose_checksum",
    "decode",
    "encode",
    "run_self_test",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
