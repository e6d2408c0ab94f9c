"""Kernels of the erasure code and the choice between them; each is loaded at its first use.

See README.md in this folder.
"""

from typing import TYPE_CHECKING

from resilient_jax.lazy_names import make_lazy_names

if TYPE_CHECKING:
    from resilient_jax.erasure.kernels.isal_kernel import IsalKernel as IsalKernel
    from resilient_jax.erasure.kernels.kernel_choice import KernelChoice as KernelChoice
    from resilient_jax.erasure.kernels.kernel_choice import choose_kernel as choose_kernel
    from resilient_jax.erasure.kernels.numpy_kernel import NumpyKernel as NumpyKernel

__getattr__, __dir__, __all__ = make_lazy_names(__name__)
