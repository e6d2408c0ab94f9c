"""The checksums of shards: every library computes standard CRC32C, and the fallback to CRC32 is reported."""

import zlib

import pytest

from resilient_jax.erasure import ChecksumName, KernelUnavailable, choose_checksum
from tests.jax.erasure.kernels import needs_isal

CHECK_INPUT = b"123456789"
CASTAGNOLI = 0xE3069283
"""CRC32C of the check input, as in the catalog of parametrized CRC algorithms (CRC-32/ISCSI)."""


@needs_isal
def test_crc32c_of_isal_is_the_standard_one():
    chosen = choose_checksum()
    assert (chosen.name, chosen.compute(CHECK_INPUT), chosen.compute(b"")) == ("crc32c", CASTAGNOLI, 0)
    assert "libisal" in chosen.library
    long = bytes(range(256)) * 100
    assert chosen.compute(memoryview(long)[3:]) == choose_checksum(ChecksumName.CRC32C).compute(long[3:])


@pytest.fixture
def no_isal(monkeypatch):
    def missing():
        raise KernelUnavailable("ISA-L is not on this machine")

    monkeypatch.setattr("resilient_jax.erasure.checksum.load_isal", missing)


@pytest.mark.usefixtures("no_isal")
def test_crc32c_of_google_is_the_standard_one():
    pytest.importorskip("google_crc32c")
    chosen = choose_checksum()
    assert (chosen.name, chosen.library) == ("crc32c", "google-crc32c")
    assert chosen.compute(bytearray(CHECK_INPUT)) == CASTAGNOLI


@pytest.mark.usefixtures("no_isal")
def test_without_a_crc32c_library_the_checksum_is_crc32_and_says_so(monkeypatch):
    monkeypatch.setattr("resilient_jax.erasure.checksum.google_crc32c", None)
    chosen = choose_checksum()
    assert (chosen.name, chosen.library, chosen.compute(CHECK_INPUT)) == (
        "crc32",
        "zlib",
        zlib.crc32(CHECK_INPUT),
    )
    with pytest.raises(KernelUnavailable, match="no library for CRC32C"):
        choose_checksum(ChecksumName.CRC32C)
