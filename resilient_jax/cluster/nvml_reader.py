"""Reads this machine's GPUs through NVML, NVIDIA's library for management, by its binding `pynvml` (`nvidia-ml-py`).

Both are optional, and loaded only when a reader is opened: the binding alone takes 2 MiB of an agent. NVML answers each
question by itself, and old drivers or small GPUs know fewer of them: what it does not answer is None in a reading.
"""

import contextlib
import ctypes
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from resilient_jax.errors import GpusUnreadable
from resilient_jax.health.gpu_reading import GpuReading, GpuXid

BINDING: Final = "pynvml"
INSTALL: Final = "pip install 'resilient_jax[gpu-health]'"
CONTROL_DEVICE: Final = Path("/dev/nvidiactl")
"""Is there exactly where NVIDIA's driver is, in containers with GPUs, too."""
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"

TEMPERATURE: Final = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature")
"""The second is to go with CUDA 14; bindings and drivers of before 2025 have only that."""
THROTTLING: Final = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
"""Two names of one thing; drivers before 535 have only the second."""


def uses_gpus(environment: Mapping[str, str]) -> bool:
    """Return whether workers with this environment train on NVIDIA's GPUs, as far as one can know without JAX."""
    if parse_visible_devices(environment.get(VISIBLE)) == ():
        return False  # a usual way to train on the processor of a machine with GPUs
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms:
        return not {"cuda", "gpu"}.isdisjoint(platforms.split(","))
    return CONTROL_DEVICE.exists()


def parse_visible_devices(value: str | None) -> tuple[str, ...] | None:
    """Return the GPUs of a value of CUDA_VISIBLE_DEVICES, by index or UUID; None: all."""
    if value is None:
        return None
    words = [word.strip() for word in value.split(",")]
    # CUDA ends the list at the first -1; an empty value hides all GPUs.
    return tuple(words[: words.index("-1")] if "-1" in words else [word for word in words if word])


class _Device:
    """A GPU that workers see: its index, its handle, and what never changes of it."""

    def __init__(self, index: int, handle: ctypes.c_void_p | None, problem: str = "") -> None:
        self.index = index
        self.handle = handle
        self.problem = problem
        self.uuid = ""
        self.name = ""
        self.max_clock_mhz: int | None = None


class NvmlReader:
    """The GPUs that this host's workers see. For one thread; it must be closed.

    Args:
        visible: value of CUDA_VISIBLE_DEVICES; None: workers see all.

    Attributes:
        xid_problem: why no XID is heard; empty: XIDs are heard.

    Raises:
        GpusUnreadable: there is no binding, no library or no driver.
    """

    def __init__(self, visible: str | None = None) -> None:
        try:
            # By its name, so that it is loaded only here.
            self._nvml: ModuleType = importlib.import_module(BINDING)
        except ImportError as error:
            raise GpusUnreadable(f"found no module {BINDING} ({error}), expected it. {INSTALL}") from error
        self._error: type[Exception] = self._nvml.NVMLError
        try:
            self._nvml.nvmlInit()
        except self._error as error:
            raise GpusUnreadable(
                f"found no usable NVML ({error}), expected libnvidia-ml.so.1 and NVIDIA's driver. In a container: "
                "--gpus all"
            ) from error
        try:
            self._devices = self._select(parse_visible_devices(visible))
        except self._error as error:
            self._nvml.nvmlShutdown()
            raise GpusUnreadable(
                f"NVML could not list the GPUs: {error}. See what nvidia-smi says"
            ) from error
        self.xid_problem = ""
        self._event_set: Any = None
        self._register_xids()

    def read(self) -> tuple[GpuReading, ...]:
        """Return a reading of each GPU."""
        return tuple(self._read(device) for device in self._devices)

    def wait_xids(self, timeout_s: float) -> tuple[GpuXid, ...] | None:
        """Wait for XIDs, at most for a time.

        Returns:
            The XIDs that came; (): no XID came in that time. None: XIDs are not heard, see `xid_problem`.
        """
        if self._event_set is None:
            return None
        heard: list[GpuXid] = []
        while True:
            try:
                data = self._nvml.nvmlEventSetWait(self._event_set, 0 if heard else int(timeout_s * 1000))
            except self._error as error:
                if not isinstance(error, self._nvml.NVMLError_Timeout):
                    # As when a GPU has fallen off the bus, which the next reading tells. NVML answers so at once, each
                    # time: whoever waited again would never sleep.
                    self._drop_xids(f"NVML no longer waits for XIDs: {error}")
                return tuple(heard)
            index = self._find_index(data.device)
            if index is not None and data.eventType == self._nvml.nvmlEventTypeXidCriticalError:
                heard.append(GpuXid(index=index, code=int(data.eventData)))

    def close(self) -> None:
        """Leave NVML."""
        self._drop_xids("the reader is closed")
        with contextlib.suppress(self._error):  # nothing is left to do
            self._nvml.nvmlShutdown()

    def _select(self, visible: Sequence[str] | None) -> list[_Device]:
        present: list[_Device] = []
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                present.append(_Device(index, self._nvml.nvmlDeviceGetHandleByIndex(index)))
            except self._nvml.NVMLError_NoPermission:
                pass  # another job's, by its cgroup; CUDA does not count it either
            except self._error as error:
                present.append(_Device(index, None, str(error)))
        for device in present:
            if device.handle is not None:
                device.uuid = self._ask(device, "nvmlDeviceGetUUID") or ""
                device.name = self._ask(device, "nvmlDeviceGetName") or ""
                device.max_clock_mhz = self._ask(
                    device, "nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_SM
                )
        if visible is None:
            return present
        found: dict[tuple[int, str], _Device] = {}
        for device in (self._find(word, present) for word in visible):
            # Two parts of one GPU are one: its readings would count twice.
            found.setdefault((device.index, device.uuid), device)
        return list(found.values())

    def _find(self, word: str, present: Sequence[_Device]) -> _Device:
        """Return the GPU that a word of CUDA_VISIBLE_DEVICES means: an index, or the beginning of a UUID."""
        if word.isdecimal():
            if int(word) < len(present):
                return present[int(word)]
        elif word.startswith("MIG-"):
            return self._find_parent(word)
        else:
            found = [device for device in present if device.uuid.startswith(word)]
            if found:
                return found[0]
        # CUDA leaves out this GPU and all after it, without a word.
        missing = _Device(-1, None, f"{VISIBLE} names it, and NVML lists {len(present)} GPUs without it")
        missing.uuid = word
        return missing

    def _find_parent(self, word: str) -> _Device:
        """Return the GPU of which a part is meant: errors are of the GPU, not of its part."""
        missing = _Device(-1, None)
        missing.uuid = word
        try:
            part = self._nvml.nvmlDeviceGetHandleByUUID(word.encode())
            handle = self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
            device = _Device(self._nvml.nvmlDeviceGetIndex(handle), handle)
        except self._error as error:
            missing.problem = f"{VISIBLE} names it, and NVML does not know it: {error}"
            return missing
        device.uuid = self._ask(device, "nvmlDeviceGetUUID") or ""
        device.name = self._ask(device, "nvmlDeviceGetName") or ""
        return device

    def _read(self, device: _Device) -> GpuReading:
        nvml, known = self._nvml, {"index": device.index, "uuid": device.uuid, "name": device.name}
        if device.handle is None:
            return GpuReading(**known, problem=device.problem)
        device.problem = ""
        remapped = self._ask(device, "nvmlDeviceGetRemappedRows")
        pages = self._ask(device, "nvmlDeviceGetRetiredPagesPendingStatus")
        reading = GpuReading(
            **known,
            temperature_c=self._ask_first(device, TEMPERATURE, nvml.NVML_TEMPERATURE_GPU),
            clock_mhz=self._ask(device, "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            max_clock_mhz=device.max_clock_mhz,
            throttle_bits=self._ask_first(device, THROTTLING),
            uncorrected_ecc=self._ask(
                device,
                "nvmlDeviceGetTotalEccErrors",
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            is_page_pending=None if pages is None else bool(pages),
            is_remap_pending=None if remapped is None else bool(remapped[2]),
            has_remap_failed=None if remapped is None else bool(remapped[3]),
        )
        return GpuReading(**known, problem=device.problem) if device.problem else reading

    def _ask(self, device: _Device, question: str, *arguments: object) -> Any:  # noqa: ANN401 - as the question
        return self._ask_first(device, (question,), *arguments)

    def _ask_first(self, device: _Device, questions: Sequence[str], *arguments: object) -> Any:  # noqa: ANN401 - as the question
        """Return the answer to the first question that this binding and driver know; None: to none, or no answer."""
        lost = (self._nvml.NVMLError_GpuIsLost, self._nvml.NVMLError_ResetRequired)
        for question in questions:
            ask = getattr(self._nvml, question, None)
            if ask is None:
                continue
            try:
                return ask(device.handle, *arguments)
            except self._nvml.NVMLError_FunctionNotFound:
                continue
            except self._error as error:
                if isinstance(error, lost):
                    device.problem = str(error)
                return None
        return None

    def _register_xids(self) -> None:
        problem = "NVML lists no GPU"
        try:
            self._event_set = self._nvml.nvmlEventSetCreate()
        except self._error as error:
            self.xid_problem = f"NVML makes no set of events: {error}"
            return
        num_registered = 0
        for device in self._devices:
            if device.handle is None:
                continue
            try:
                self._nvml.nvmlDeviceRegisterEvents(
                    device.handle, self._nvml.nvmlEventTypeXidCriticalError, self._event_set
                )
                num_registered += 1
            except self._error as error:
                problem = f"{error} (GPU {device.index})"
        if not num_registered:
            self._drop_xids(f"no GPU reports XIDs: {problem}")

    def _drop_xids(self, problem: str) -> None:
        if self._event_set is None:
            return
        event_set, self._event_set, self.xid_problem = self._event_set, None, problem
        with contextlib.suppress(self._error):  # it ends with NVML
            self._nvml.nvmlEventSetFree(event_set)

    def _find_index(self, handle: ctypes.c_void_p) -> int | None:
        """Return the index of a GPU by its handle: the UUID of one that is lost cannot be asked for."""
        address = _find_address(handle)
        return next(
            (d.index for d in self._devices if d.handle is not None and _find_address(d.handle) == address),
            None,
        )


def _find_address(handle: ctypes.c_void_p) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
