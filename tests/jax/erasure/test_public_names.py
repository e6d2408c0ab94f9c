"""The public names of the erasure code."""

import importlib

import pytest

PUBLIC = {
    "resilient_jax.erasure": (
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
    ),
    "resilient_jax.erasure.kernels": (
        "IsalKernel",
        "KernelChoice",
        "NumpyKernel",
        "choose_kernel",
    ),
}


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_are_as_listed_and_resolve(module):
    home = importlib.import_module(module)
    assert tuple(sorted(home.__all__)) == PUBLIC[module] == tuple(sorted(dir(home)))
    for name in PUBLIC[module]:
        assert not isinstance(getattr(home, name), type(home)), (
            f"{name} is shadowed by a module of the same name"
        )


@pytest.mark.parametrize("module", PUBLIC)
def test_a_name_that_is_not_public_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'; it has .*Kernel"):
        _ = importlib.import_module(module).nothing
