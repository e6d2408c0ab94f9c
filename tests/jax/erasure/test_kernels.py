"""The kernels of the erasure code: one contract for all, and the choice between them."""

import subprocess
import sys

import numpy as np
import pytest

from resilient_jax.erasure import (
    ErasureCodeError,
    Kernel,
    KernelName,
    KernelSelfTestFailed,
    KernelUnavailable,
    ReedSolomon,
    encode,
    kernels,
    run_self_test,
)
from resilient_jax.erasure.isal_library import load_isal
from resilient_jax.erasure.kernels import (
    NumpyKernel,
    choose_kernel,
    isal_kernel,
)
from resilient_jax.erasure.kernels.numpy_kernel import BLOCK_BYTES
from tests.conformance.erasure_conformance import (
    CHECKS,
    apply_guarded,
    compute_expected,
    make_random_buffers,
)
from tests.jax.erasure.kernels import KERNELS, needs_isal
from tests.support.patience import patience


@pytest.fixture(params=KERNELS)
def kernel(request):
    return request.param()


@pytest.fixture
def no_isal(monkeypatch):
    def missing():
        raise KernelUnavailable("ISA-L is not on this machine")

    monkeypatch.setattr(isal_kernel, "load_isal", missing)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_kernel_keeps_the_contract(check, kernel):
    check(kernel)


def test_a_kernel_passes_its_self_test(kernel):
    tested = run_self_test(kernel)
    # 15 us each, in every process that keeps parity.
    assert 100 < tested.columns < 200


class OneBitWrong(Kernel):
    """A kernel that flips a bit of the last byte of the last destination."""

    name = KernelName.NUMPY
    description = "broken on purpose"

    def __init__(self, longer_than):
        self.longer_than = longer_than

    def _multiply(self, matrix, operands):
        NumpyKernel()._multiply(matrix, operands)
        if len(matrix[0]) > self.longer_than:
            operands.destinations[-1][-1] ^= 1


@pytest.mark.parametrize(
    ("longer_than", "message"), [(0, "wrong products with 255"), (1, "parity of k = 4, m = 2 at byte")]
)
def test_the_self_test_finds_a_wrong_bit(longer_than, message):
    with pytest.raises(KernelSelfTestFailed, match=message):
        run_self_test(OneBitWrong(longer_than))


def test_numpy_arrays_are_buffers(kernel):
    data = np.arange(3 * 100, dtype=np.uint8).reshape(3, 100)
    data.flags.writeable = False
    parity = np.zeros((2, 100), np.uint8)
    code = ReedSolomon(3, 2)
    encode(code, kernel, list(data), list(parity))
    assert [row.tobytes() for row in parity] == compute_expected(
        code.parity_matrix, [row.tobytes() for row in data]
    )


def test_a_wrong_dtype_is_refused_with_a_remedy(kernel):
    with pytest.raises(
        ErasureCodeError, match=r"source 0: found 1 dimensions of format 'H', expected .*view\(numpy.uint8\)"
    ):
        kernel.apply((b"\x01",), [np.zeros(4, np.uint16)], [bytearray(8)])


def test_a_dtype_without_a_buffer_format_is_refused():
    bfloat16 = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    with pytest.raises(ErasureCodeError, match="source 0: found ndarray, expected a buffer of bytes"):
        NumpyKernel().apply((b"\x01",), [np.zeros(4, bfloat16)], [bytearray(8)])


@pytest.mark.parametrize("length", [BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_the_numpy_kernel_joins_its_blocks(length):
    matrix, sources = ReedSolomon(2, 2).parity_matrix, make_random_buffers(2, length)
    assert apply_guarded(NumpyKernel(), matrix, sources) == compute_expected(matrix, sources)


@needs_isal
def test_isal_is_chosen_where_it_is_installed():
    chosen = choose_kernel()
    assert (chosen.kernel.name, chosen.reason) == ("isal", "isal is the fastest")
    assert "libisal" in chosen.kernel.description


@pytest.mark.usefixtures("no_isal")
def test_without_isal_numpy_is_chosen_with_the_reason():
    chosen = choose_kernel()
    assert chosen.kernel.name == "numpy"
    assert chosen.reason == "numpy is the fastest that can be used: isal: ISA-L is not on this machine"


def test_a_kernel_that_computes_wrong_bytes_is_rejected(monkeypatch):
    monkeypatch.setattr(kernels, "IsalKernel", lambda: OneBitWrong(0), raising=False)
    chosen = choose_kernel()
    assert chosen.kernel.name == "numpy"
    assert "wrong products" in chosen.reason
    monkeypatch.setattr(kernels, "NumpyKernel", lambda: OneBitWrong(0), raising=False)
    with pytest.raises(KernelSelfTestFailed):
        choose_kernel()


def test_the_error_of_a_missing_isal_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(
        "resilient_jax.erasure.isal_library._candidates", lambda: iter(["/nowhere/libisal.so.2"])
    )
    with pytest.raises(KernelUnavailable, match=r"pip install 'resilient_jax\[isal\]'.*/nowhere/libisal"):
        load_isal.__wrapped__()


def test_choosing_loads_no_jax():
    program = "import sys, resilient_jax.erasure.kernels as e; e.choose_kernel(); print('jax' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(6), check=True
    )
    assert result.stdout.strip() == "False"
