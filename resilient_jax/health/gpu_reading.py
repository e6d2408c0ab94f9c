"""What NVML says of a GPU at one moment. What NVML does not say of it, or cannot, is None."""

import msgspec


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU, read once.

    Attributes:
        index: index of the GPU among those that NVML lists; -1: NVML lists no such GPU.
        uuid: as NVML writes it; empty if NVML does not tell.
        name: name of the product; empty if NVML does not tell.
        temperature_c: degrees Celsius.
        throttle_bits: why clocks are lower than they could be, as bits of `gpu_health.THROTTLE_REASONS`.
        uncorrected_ecc: uncorrected memory errors since the driver was loaded, or the GPU was reset.
        is_page_pending: whether pages of the GPU's memory are retired by the next reset (before Ampere).
        is_remap_pending: whether rows of the GPU's memory are replaced by the next reset (since Ampere).
        has_remap_failed: whether a row of the GPU's memory could not be replaced, at any time.
        problem: why the GPU cannot be used; empty if NVML reaches it.
    """

    index: int
    uuid: str = ""
    name: str = ""
    temperature_c: int | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    throttle_bits: int | None = None
    uncorrected_ecc: int | None = None
    is_page_pending: bool | None = None
    is_remap_pending: bool | None = None
    has_remap_failed: bool | None = None
    problem: str = ""

    @property
    def label(self) -> str:
        """The GPU as people look for it, such as "GPU 3 (GPU-5c1e...)"."""
        if self.index < 0:
            return f"GPU {self.uuid}"
        return f"GPU {self.index} ({self.uuid})" if self.uuid else f"GPU {self.index}"


class GpuXid(msgspec.Struct, frozen=True, kw_only=True):
    """An error that the driver reported of a GPU.

    Attributes:
        index: index of the GPU among those that NVML lists.
    """

    index: int
    code: int
