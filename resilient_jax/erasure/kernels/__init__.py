"""Kernels of the erasure code and the choice between them; each is loaded at its first use.

See README.md in this folder.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient_jax.erasure.kernels.isal_kernel import IsalKernel as IsalKernel
    from resilient_jax.erasure.kernels.kernel_choice import KernelChoice as KernelChoice
    from resilient_jax.erasure.kernels.kernel_choice import choose_kernel as choose_kernel
    from resilient_jax.erasure.kernels.numpy_kernel import NumpyKernel as NumpyKernel

_HOME = {
    "IsalKernel": "isal_kernel",
    "KernelChoice": "kernel_choice",
    "NumpyKernel": "numpy_kernel",
    "choose_kernel": "kernel_choice",
}

__all__ = ["IsalKernel", "KernelChoice", "NumpyKernel", "choose_kernel"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any public name
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
