"""The constants of the cost model: the part of its data sheet that hardware reaches; in a file beside the topology."""

import dataclasses
import math
import tomllib
from pathlib import Path

from resilient_jax.errors import CallerError, ConfigError

MIB = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants of the cost model that complete a topology's data-sheet figures.

    The defaults are assumptions for large accelerators, each with its reason; `fit_calibration` replaces those that
    measurements can tell apart.

    Attributes:
        matrix_efficiency: part of the peak that large matrix products reach. 0.75: bf16 products of 8192 x 8192 are
            commonly measured at 0.7 to 0.8 of the dense peak of A100 and H100.
        attention_efficiency: part of `matrix_efficiency` that the products of attention reach. 0.7: FlashAttention-2
            reaches 0.50 to 0.73 of the peak of an A100 (Dao 2023, https://arxiv.org/abs/2307.08691), 0.35 of an H100's,
            and FlashAttention-3 up to 0.75 forward (Shah et al. 2024, https://arxiv.org/abs/2407.08608).
        memory_efficiency: part of the memory's bandwidth that element-wise kernels reach. 0.8: STREAM-like kernels
            reach 0.8 to 0.9, and not everything is fused.
        link_efficiency: part of a link's bandwidth that a large collective reaches. 0.8: bus bandwidth in published
            runs of nccl-tests is 0.75 to 0.9 of the line rate.
        latency_factor: latency of a message in a collective, as a multiple of the link's. 1: data sheets and nccl-tests
            state what NCCL has. On a machine whose devices share a few cores messages wait for a core.
        kernel_overhead_s: time of each kernel for its launch, its first and its last wave. Efficiency becomes a curve
            over the work w of a kernel, `matrix_efficiency w / (w + w_half)`: wide tensor groups, which divide each
            kernel, and small microbatches reach less. 5 us: assumed.
        step_overhead_s: time of each step for dispatch of the update and input. 1 ms: assumed.
        fsdp_overlap: part of the computing time under which FSDP's gathers and scatters can hide. 0.9: the first and
            the last layer of a pass have nothing to hide under.
        activation_overlap: part of the collectives of activations that hides under computing. 0: their result is needed
            at once.
        usable_memory: part of a device's memory that a program can have. 0.92: the runtime, NCCL and fragmentation
            take the rest; XLA's own default on GPU is 0.75, jobs raise it.
        staging_bytes: device memory for the copy of a snapshot to the host, which copies from the state itself and
            needs only buffers. 64 MiB: two chunks of 32.
    """

    matrix_efficiency: float = 0.75
    attention_efficiency: float = 0.7
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    latency_factor: float = 1.0
    kernel_overhead_s: float = 5e-6
    step_overhead_s: float = 1e-3
    fsdp_overlap: float = 0.9
    activation_overlap: float = 0.0
    usable_memory: float = 0.92
    staging_bytes: float = 64.0 * MIB

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            low_open, high = field.name in _POSITIVE, 1.0 if field.name in _PARTS else math.inf
            if not (value > 0 if low_open else value >= 0) or not value <= high or not math.isfinite(value):
                raise CallerError(
                    f"calibration: {field.name}: found {value}, expected a number {'>' if low_open else '>='} 0"
                    + (" and <= 1" if high == 1.0 else "")
                )


_POSITIVE = frozenset(
    {"matrix_efficiency", "attention_efficiency", "memory_efficiency", "link_efficiency", "usable_memory"}
)
_PARTS = _POSITIVE | {"fsdp_overlap", "activation_overlap"}


def load_calibration(path: str | Path) -> Calibration:
    """Return the constants in a TOML file; a missing key has its default.

    Raises:
        ConfigError: the file cannot be read, has an unknown key, or a value out of range; names file and key.
    """
    try:
        values = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: found no file that can be read ({error.strerror}), expected a calibration. Check the path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: found no TOML ({error}), expected a calibration. Correct it") from error
    known = [field.name for field in dataclasses.fields(Calibration)]
    for key, value in values.items():
        if key not in known:
            raise ConfigError(
                f"{path}: key '{key}': found an unknown key, expected one of {', '.join(known)}"
            )
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{path}: key '{key}': found {value!r}, expected a number")
    try:
        return Calibration(**{key: float(value) for key, value in values.items()})
    except (CallerError, OverflowError) as error:
        raise ConfigError(f"{path}: {error}") from error


DEFAULT_CALIBRATION = Calibration()
