"""Which kernel this process uses, and why: a decision that the caller makes an event."""

from collections.abc import Callable
from dataclasses import dataclass

from resilient_jax.erasure import kernels
from resilient_jax.erasure.errors import KernelMissing, KernelWrong
from resilient_jax.erasure.kernel import Kernel, KernelName
from resilient_jax.erasure.self_test import SelfTest, check_kernel


@dataclass(frozen=True, slots=True)
class PassedOver:
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
    passed_over: tuple[PassedOver, ...]
    self_test: SelfTest


def choose_kernel(forced: KernelName | None = None, *, may_use_jax: bool = False) -> KernelChoice:
    """The fastest kernel that is on this machine and passes its self-test.

    Args:
        forced: take this one or fail.
        may_use_jax: whether XLA is looked at without being forced. Only for a process whose jax is already
            started: it loads jax and starts its backends.

    Raises:
        KernelMissing: the forced kernel is not on this machine; says what to install.
        KernelWrong: the forced kernel, or the last that is left, computes wrong bytes.
    """
    if forced is not None:
        kernel = _make(forced)
        return KernelChoice(kernel, f"{forced} was asked for", (), check_kernel(kernel))
    passed_over: list[PassedOver] = []
    for name in (KernelName.ISAL, KernelName.XLA):
        if name is KernelName.XLA and not may_use_jax:
            passed_over.append(PassedOver(name, "this process does not run jax"))
            continue
        try:
            kernel = _make(name)
            return KernelChoice(kernel, _reason(name, passed_over), tuple(passed_over), check_kernel(kernel))
        except (KernelMissing, KernelWrong) as error:
            passed_over.append(PassedOver(name, str(error)))
    kernel = _make(KernelName.NUMPY)
    reason = _reason(KernelName.NUMPY, passed_over)
    return KernelChoice(kernel, reason, tuple(passed_over), check_kernel(kernel))


def _reason(name: KernelName, passed_over: list[PassedOver]) -> str:
    if not passed_over:
        return f"{name} is the fastest"
    return f"{name} is the fastest that can be used: " + "; ".join(
        f"{p.name}: {p.reason}" for p in passed_over
    )


def _make(name: KernelName) -> Kernel:
    # The classes are loaded by their names' first use: a process without jax never imports the XLA kernel.
    makers: dict[KernelName, Callable[[], Kernel]] = {
        KernelName.ISAL: lambda: kernels.IsalKernel(),
        KernelName.XLA: lambda: kernels.XlaKernel(),
        KernelName.NUMPY: lambda: kernels.NumpyKernel(),
    }
    return makers[name]()
