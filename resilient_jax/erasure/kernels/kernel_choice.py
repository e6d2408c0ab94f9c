"""The choice of the kernel of this process, with the reason, which the caller records as an event."""

from collections.abc import Callable
from dataclasses import dataclass

from resilient_jax.erasure import kernels
from resilient_jax.erasure.errors import KernelSelfTestFailed, KernelUnavailable
from resilient_jax.erasure.kernel import Kernel, KernelName
from resilient_jax.erasure.self_test import SelfTest, run_self_test


@dataclass(frozen=True, slots=True)
class RejectedKernel:
    """A faster kernel that is not used, and the reason."""

    name: KernelName
    reason: str


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel to use.

    Attributes:
        kernel: a kernel that passed its self-test in this process.
        reason: text for people.
        rejected: faster kernels that cannot be used. If there is one, this process is slower than it could be.
    """

    kernel: Kernel
    reason: str
    rejected: tuple[RejectedKernel, ...]
    self_test: SelfTest


def choose_kernel(requested: KernelName | None = None, *, allow_jax: bool = False) -> KernelChoice:
    """Return the fastest kernel that is on this machine and passes its self-test.

    Args:
        requested: the only kernel to try; None: any.
        allow_jax: also consider XLA. Only for a process that has initialized jax already: it loads jax and starts
            its backends.

    Raises:
        KernelUnavailable: the requested kernel is not on this machine; the message names what to install.
        KernelSelfTestFailed: the requested kernel, or the last that is left, computes wrong bytes.
    """
    if requested is not None:
        kernel = _make_kernel(requested)
        return KernelChoice(kernel, f"{requested} was requested", (), run_self_test(kernel))
    # Fastest first; measured on one CPU core with k = 8, m = 2: ISA-L 9.5, XLA 5.3, numpy 1.0 GB/s of data.
    rejected: list[RejectedKernel] = []
    for name in (KernelName.ISAL, KernelName.XLA):
        if name is KernelName.XLA and not allow_jax:
            rejected.append(RejectedKernel(name, "this process does not run jax"))
            continue
        try:
            kernel = _make_kernel(name)
            return KernelChoice(kernel, _reason(name, rejected), tuple(rejected), run_self_test(kernel))
        except (KernelUnavailable, KernelSelfTestFailed) as error:
            rejected.append(RejectedKernel(name, str(error)))
    # Every installation has numpy; a failed self-test of this last kernel is an error.
    kernel = _make_kernel(KernelName.NUMPY)
    reason = _reason(KernelName.NUMPY, rejected)
    return KernelChoice(kernel, reason, tuple(rejected), run_self_test(kernel))


def _reason(name: KernelName, rejected: list[RejectedKernel]) -> str:
    if not rejected:
        return f"{name} is the fastest"
    return f"{name} is the fastest that can be used: " + "; ".join(f"{p.name}: {p.reason}" for p in rejected)


def _make_kernel(name: KernelName) -> Kernel:
    # The first use of its name loads a class: a process without jax never imports the XLA kernel.
    makers: dict[KernelName, Callable[[], Kernel]] = {
        KernelName.ISAL: lambda: kernels.IsalKernel(),
        KernelName.XLA: lambda: kernels.XlaKernel(),
        KernelName.NUMPY: lambda: kernels.NumpyKernel(),
    }
    return makers[name]()
