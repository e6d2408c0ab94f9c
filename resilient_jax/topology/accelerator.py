"""One kind of accelerator: peak arithmetic rates and memory."""

import dataclasses
import enum
import math

from resilient_jax.topology.errors import TopologyError


class NumberFormat(enum.StrEnum):
    """Format of the operands of a matrix product; sums are usually in fp32.

    `tf32` is fp32 arrays multiplied in fewer bits.
    """

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    INT8 = "int8"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The peak rate in one format: dense floating point operations per second, a multiply-add being two."""

    number_format: NumberFormat
    flops_per_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Figures of one device, by its data sheet or as measured.

    Attributes:
        name: such as "NVIDIA H100 SXM 80GB".
        peaks: one per number format, dense (no sparsity).
        memory_bytes: size of the device's memory.
        memory_bandwidth_bytes_per_s: bandwidth between the device and its memory, reads and writes together.
    """

    name: str
    peaks: tuple[Peak, ...]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    source: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        numbers = {
            **{f"peak in {peak.number_format}": peak.flops_per_s for peak in self.peaks},
            "memory_bytes": self.memory_bytes,
            "memory_bandwidth_bytes_per_s": self.memory_bandwidth_bytes_per_s,
        }
        for name, number in numbers.items():
            if not 0 < number < math.inf:
                raise TopologyError(
                    f"accelerator {self.name!r}: {name}: found {number}, expected a number > 0",
                    key="accelerators",
                )

    def peak_flops_per_s(self, number_format: NumberFormat | str) -> float:
        """Return the peak in one number format.

        Raises:
            TopologyError: the peak is unknown; no other format's is taken instead.
        """
        known = {peak.number_format: peak.flops_per_s for peak in self.peaks}
        if number_format in known:
            return known[NumberFormat(number_format)]
        raise TopologyError(
            f"accelerator {self.name!r}: found no peak for {str(number_format)!r}, expected one of "
            f"{', '.join(known)}. Choose one of these, or add peak_flops_per_s.{number_format} to the topology file",
            key="accelerators",
        )
