"""The erasure code's kernels as parameters of tests; ISA-L's are skipped where it is not installed."""

import pytest

from resilient_jax.erasure.errors import KernelUnavailable
from resilient_jax.erasure.isal_library import load_isal
from resilient_jax.erasure.kernel import KernelName
from resilient_jax.erasure.kernels import IsalKernel, NumpyKernel


def _has_isal():
    try:
        load_isal()
    except KernelUnavailable:
        return False
    return True


needs_isal = pytest.mark.skipif(
    not _has_isal(), reason="ISA-L is not here: pip install 'resilient_jax[isal]'"
)

KERNELS = [
    pytest.param(IsalKernel, marks=needs_isal, id=KernelName.ISAL),
    pytest.param(NumpyKernel, id="numpy"),
]
