"""Which kernel this process uses, and why: a decision that the caller makes an event."""

from collections.abc import Callable
from dataclasses import dataclass

from resilient_jax.erasure import kernels
from resilient_jax.erasure.errors import KernelSelfTestFailed, KernelUnavailable
from resilient_jax.erasure.kernel import Kernel, KernelName
from resilient_jax.erasure.self_test import SelfTest, run_self_test


@dataclass(frozen=True, slots=True)
class RejectedKernel:
    """A faster kernel that is not used, and why."""

    name: KernelName
    reason: str


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The kernel to use.

    Attributes:
        kernel: passed its self-test in this process.
        reason: why this one, for people.
        passed_over: faster ones that could not be used. If there is one, this process is slower than it could be.
        self_test: what was compared with reedsolo.
    """

    kernel: Kernel
    reason: str
    rejected: tuple[RejectedKernel, ...]
    self_test: SelfTest


def choose_kernel(requested: KernelName | None = None, *, allow_jax: bool = False) -> KernelChoice:
    """The fastest kernel that is on this machine and passes its self-test.

    Args:
        forced: take this one or fail.
        allow_jax: whether XLA is looked at without being forced. Only for a process whose jax is already
            started: it loads jax and starts its backends.

    Raises:
        KernelUnavailable: the forced kernel is not on this machine; says what to install.
        KernelSelfTestFailed: the forced kernel, or the last that is left, computes wrong bytes.
    """
    if requested is not None:
        kernel = _make_kernel(requested)
        return KernelChoice(kernel, f"{requested} was asked for", (), run_self_test(kernel))
    passed_over: list[RejectedKernel] = []
    for name in (KernelName.ISAL, KernelName.XLA):
        if name is KernelName.XLA and not allow_jax:
            passed_over.append(RejectedKernel(name, "this process does not run jax"))
            continue
        try:
            kernel = _make_kernel(name)
            return KernelChoice(kernel, _reason(name, passed_over), tuple(passed_over), run_self_test(kernel))
        except (KernelUnavailable, KernelSelfTestFailed) as error:
            passed_over.append(RejectedKernel(name, str(error)))
    kernel = _make_kernel(KernelName.NUMPY)
    reason = _reason(KernelName.NUMPY, passed_over)
    return KernelChoice(kernel, reason, tuple(passed_over), run_self_test(kernel))


def _reason(name: KernelName, passed_over: list[RejectedKernel]) -> str:
    if not passed_over:
        return f"{name} is the fastest"
    return f"{name} is the fastest that can be used: " + "; ".join(
        f"{p.name}: {p.reason}" for p in passed_over
    )


def _make_kernel(name: KernelName) -> Kernel:
    # The classes are loaded by their names' first use: a process without jax never imports the XLA kernel.
    makers: dict[KernelName, Callable[[], Kernel]] = {
        KernelName.ISAL: lambda: kernels.IsalKernel(),
        KernelName.XLA: lambda: kernels.XlaKernel(),
        KernelName.NUMPY: lambda: kernels.NumpyKernel(),
    }
    return makers[name]()
