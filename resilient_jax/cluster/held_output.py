"""What a standby prints is the worker's output, from the moment when it is the worker."""

import asyncio

from resilient_jax.cluster.child_process import LineReader
from resilient_jax.cluster.worker_output import WorkerOutput

MAX_HELD_BYTES = 2**20
"""Room for what a standby prints before; it waits when the room is used up."""


class HeldOutput:
    """Keeps the lines of a standby until they are released to the host's output."""

    def __init__(self, output: WorkerOutput) -> None:
        self._output = output
        self._released = asyncio.Event()
        self._held: list[tuple[bytes, bool]] = []
        self._num_bytes = 0

    async def follow(self, reader: LineReader, *, is_error: bool) -> None:
        """Copy lines until the stream ends."""
        while not self._released.is_set() and self._num_bytes < MAX_HELD_BYTES:
            if not (line := await reader.readline()):
                return
            self._take(line.rstrip(b"\r\n"), is_error=is_error)
        await self._released.wait()
        await self._output.follow(reader, is_error=is_error)

    def read_last_errors(self) -> str:
        """Return the end of what was written to standard error; of a standby, the last line."""
        if self._released.is_set():
            return self._output.read_last_errors()
        errors = [line for line, is_error in self._held if is_error and line.strip()]
        return errors[-1].decode(errors="replace") if errors else ""

    def release(self) -> None:
        """Write what was held, and from now on each line as it comes."""
        self._released.set()
        for line, is_error in self._held:
            self._output.write(line, is_error=is_error)
        self._held.clear()

    def _take(self, line: bytes, *, is_error: bool) -> None:
        if self._released.is_set():
            self._output.write(line, is_error=is_error)
            return
        self._held.append((line, is_error))
        self._num_bytes += len(line) + 1
