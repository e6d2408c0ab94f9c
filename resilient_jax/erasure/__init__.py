"""Reed-Solomon erasure code over GF(2^8) on buffers of bytes: parity, lost shards and checksums.

See README.md in this folder. The import loads neither jax nor numpy.
"""

from typing import TYPE_CHECKING

from resilient_jax.lazy_names import make_lazy_names

if TYPE_CHECKING:
    from resilient_jax.erasure.buffers import Buffer as Buffer
    from resilient_jax.erasure.checksum import Checksum as Checksum
    from resilient_jax.erasure.checksum import ChecksumName as ChecksumName
    from resilient_jax.erasure.checksum import choose_checksum as choose_checksum
    from resilient_jax.erasure.errors import ErasureCodeError as ErasureCodeError
    from resilient_jax.erasure.errors import KernelSelfTestFailed as KernelSelfTestFailed
    from resilient_jax.erasure.errors import KernelUnavailable as KernelUnavailable
    from resilient_jax.erasure.errors import TooManyErasures as TooManyErasures
    from resilient_jax.erasure.kernel import Kernel as Kernel
    from resilient_jax.erasure.kernel import KernelName as KernelName
    from resilient_jax.erasure.reed_solomon import ReedSolomon as ReedSolomon
    from resilient_jax.erasure.self_test import run_self_test as run_self_test
    from resilient_jax.erasure.shards import decode as decode
    from resilient_jax.erasure.shards import encode as encode

__getattr__, __dir__, __all__ = make_lazy_names(__name__)
