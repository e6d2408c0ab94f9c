"""Reed-Solomon over GF(2^8) on buffers of bytes: parity, lost shards, dirty columns, repair.

See README.md in this folder. Loads neither jax nor numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient_jax.erasure.buffers import Buffer as Buffer
    from resilient_jax.erasure.checksum import Checksum as Checksum
    from resilient_jax.erasure.checksum import ChecksumName as ChecksumName
    from resilient_jax.erasure.checksum import choose_checksum as choose_checksum
    from resilient_jax.erasure.checksum import verify_against as verify_against
    from resilient_jax.erasure.decoding import decode as decode
    from resilient_jax.erasure.encoding import add_shard as add_shard
    from resilient_jax.erasure.encoding import encode as encode
    from resilient_jax.erasure.encoding import update_parity as update_parity
    from resilient_jax.erasure.errors import ErasureCodeError as ErasureCodeError
    from resilient_jax.erasure.errors import KernelSelfTestFailed as KernelSelfTestFailed
    from resilient_jax.erasure.errors import KernelUnavailable as KernelUnavailable
    from resilient_jax.erasure.errors import NotRepaired as NotRepaired
    from resilient_jax.erasure.errors import TooManyErasures as TooManyErasures
    from resilient_jax.erasure.kernel import Kernel as Kernel
    from resilient_jax.erasure.kernel import KernelName as KernelName
    from resilient_jax.erasure.reed_solomon import ReedSolomon as ReedSolomon
    from resilient_jax.erasure.repairing import Patch as Patch
    from resilient_jax.erasure.repairing import locate as locate
    from resilient_jax.erasure.repairing import repair as repair
    from resilient_jax.erasure.scanning import DirtyBlock as DirtyBlock
    from resilient_jax.erasure.scanning import scan as scan
    from resilient_jax.erasure.self_test import run_self_test as run_self_test

_HOME = {
    "Buffer": "buffers",
    "Checksum": "checksum",
    "ChecksumName": "checksum",
    "ErasureCodeError": "errors",
    "DirtyBlock": "scanning",
    "Kernel": "kernel",
    "KernelUnavailable": "errors",
    "KernelName": "kernel",
    "KernelSelfTestFailed": "errors",
    "NotRepaired": "errors",
    "Patch": "repairing",
    "ReedSolomon": "reed_solomon",
    "TooManyErasures": "errors",
    "add_shard": "encoding",
    "run_self_test": "self_test",
    "choose_checksum": "checksum",
    "decode": "decoding",
    "encode": "encoding",
    "locate": "repairing",
    "repair": "repairing",
    "scan": "scanning",
    "update_parity": "encoding",
    "verify_against": "checksum",
}

__all__ = [
    "Buffer",
    "Checksum",
    "ChecksumName",
    "DirtyBlock",
    "ErasureCodeError",
    "Kernel",
    "KernelName",
    "KernelSelfTestFailed",
    "KernelUnavailable",
    "NotRepaired",
    "Patch",
    "ReedSolomon",
    "TooManyErasures",
    "add_shard",
    "choose_checksum",
    "decode",
    "encode",
    "locate",
    "repair",
    "run_self_test",
    "scan",
    "update_parity",
    "verify_against",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
