"""Time our erasure code and other implementations in alternation, on one core.

    erasure_timing.py WANTED.json TIMES.json

WANTED.json is an `ErasureRequest` of `benchmarks.erasure.figures`; the script writes `ErasureTimings` to TIMES.json.
Each call is made twice in a round and timed the second time, so that the caches contain its own data and not those of
the previous call.
"""

import contextlib
import ctypes
import importlib
import importlib.metadata
import mmap
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from resilient_jax.erasure import (
    Kernel,
    KernelName,
    KernelUnavailable,
    ReedSolomon,
    decode,
    encode,
    run_self_test,
)
from resilient_jax.erasure.isal_library import TABLE_BYTES, load_isal
from resilient_jax.erasure.kernels import IsalKernel, NumpyKernel, choose_kernel
from resilient_jax.erasure.matrix import Matrix
from resilient_jax.erasure.self_test import make_reference_codec
from tests.benchmarks.erasure.figures import (
    BARE_ISAL,
    MEMORY_COPY,
    REFERENCE,
    ZFEC,
    ErasureRequest,
    ErasureTask,
    ErasureTiming,
    ErasureTimings,
)

REFERENCE_COLUMNS = 200
"""reedsolo is ten thousand times slower, so it gets fewer columns."""


class Call(NamedTuple):
    """A call to time, and the bytes of data that it reads."""

    who: str
    task: ErasureTask
    data_bytes: int
    run: Callable[[], object]


class Stripe(NamedTuple):
    """Shards of one code, in one contiguous block of memory.

    Attributes:
        lost: memory for the data shards that are recomputed, by index: m of them, or all k if fewer.
        present: the other shards, by index.
    """

    code: ReedSolomon
    data: list[memoryview]
    parity: list[memoryview]
    lost: dict[int, memoryview]
    present: dict[int, memoryview]

    @property
    def length(self) -> int:
        return len(self.data[0])

    @property
    def data_bytes(self) -> int:
        return self.code.k * self.length


def main(asked: Path, found: Path) -> None:
    wanted = msgspec.json.decode(asked.read_bytes(), type=ErasureRequest)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before XLA sizes its thread pool by the cores
    kernels, missing = find_kernels()
    versions: dict[str, str] = {name: kernel.description for name, kernel in kernels.items()}
    zfec = find_zfec(missing)
    for name in (REFERENCE, ZFEC) if zfec else (REFERENCE,):
        versions[name] = importlib.metadata.version(name)
    timed: list[ErasureTiming] = []
    for m in wanted.parity_shards:
        stripe = make_stripe(ReedSolomon(wanted.data_shards, m), wanted)
        calls = list(calls_of(stripe, kernels, zfec))
        timed += measure(calls, m, wanted.rounds)
    times = ErasureTimings(
        processor=processor(),
        kernel=next(iter(kernels)),
        versions=versions,
        missing=missing,
        timed=timed,
    )
    found.write_bytes(msgspec.json.encode(times))


def find_kernels() -> tuple[dict[KernelName, Kernel], dict[str, str]]:
    """Return the available kernels, self-tested and fastest first, and the reasons why others are missing."""
    kernels: dict[KernelName, Kernel] = {}
    missing: dict[str, str] = {}
    for name, make in {KernelName.ISAL: IsalKernel, KernelName.NUMPY: NumpyKernel}.items():
        try:
            kernels[name] = make()
            run_self_test(kernels[name])
        except KernelUnavailable as error:
            missing[name] = str(error)
    return kernels, missing


def find_zfec(missing: dict[str, str]) -> Any:  # a module without types
    """Return the module zfec; None, with the reason added to `missing`, if it is not installed."""
    try:
        return importlib.import_module(ZFEC)
    except ModuleNotFoundError:
        missing[ZFEC] = "not installed"
        return None


def processor() -> str:
    """Return the model name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown processor"


def make_stripe(code: ReedSolomon, wanted: ErasureRequest) -> Stripe:
    """Return shards with random data and a gap after each, all memory touched."""
    lost = min(code.k, code.m)
    step = wanted.shard_bytes + wanted.skew_bytes
    memory = memoryview(mmap.mmap(-1, (code.n + lost) * step))
    shards = [memory[i * step : i * step + wanted.shard_bytes] for i in range(code.n + lost)]
    for shard in shards:
        shard[:] = random.randbytes(wanted.shard_bytes)
    data, parity = shards[: code.k], shards[code.k : code.n]
    encode(code, choose_kernel().kernel, data, parity)
    return Stripe(
        code=code,
        data=data,
        parity=parity,
        lost=dict(enumerate(shards[code.n :])),
        present={i: shards[i] for i in range(lost, code.n)},
    )


# Calls to time.


def calls_of(stripe: Stripe, kernels: Mapping[KernelName, Kernel], zfec: Any) -> Iterator[Call]:
    """Yield all calls to time on one stripe."""
    bare = bare_calls(stripe) if KernelName.ISAL in kernels else {}
    for name, kernel in kernels.items():
        for call in our_calls(stripe, name, kernel):
            yield call
            if name is KernelName.ISAL and call.task in bare:
                yield bare[call.task]  # next to ours, so that both run at the same speed of the machine
    if zfec is not None:
        yield from zfec_calls(stripe, zfec)
    yield from reference_calls(stripe)
    source = memoryview(bytearray(b"".join(stripe.data)))
    target = memoryview(bytearray(stripe.data_bytes))
    yield Call(
        MEMORY_COPY, ErasureTask.COPY, stripe.data_bytes, lambda: target.__setitem__(slice(None), source)
    )


def our_calls(stripe: Stripe, name: str, kernel: Kernel) -> Iterator[Call]:
    code, data, parity = stripe.code, stripe.data, stripe.parity
    yield Call(name, ErasureTask.ENCODE, stripe.data_bytes, lambda: encode(code, kernel, data, parity))
    yield Call(
        name, ErasureTask.DECODE, stripe.data_bytes, lambda: decode(code, kernel, stripe.present, stripe.lost)
    )


def bare_calls(stripe: Stripe) -> dict[ErasureTask, Call]:
    """Return calls of `ec_encode_data` on the same memory with all operands prepared: the upper limit for our speed."""
    code = stripe.code
    decoding = code.make_decoding(stripe.present, stripe.lost)
    read = [stripe.present[i] for i in decoding.sources]
    wrote = [stripe.lost[i] for i in decoding.wanted]
    runs = {
        ErasureTask.ENCODE: bare_isal(code.parity_matrix, stripe.data, stripe.parity),
        ErasureTask.DECODE: bare_isal(decoding.matrix, read, wrote),
    }
    return {task: Call(BARE_ISAL, task, stripe.data_bytes, run) for task, run in runs.items()}


def bare_isal(
    matrix: Matrix, sources: Sequence[memoryview], destinations: Sequence[memoryview]
) -> Callable[[], object]:
    library, rows, columns = load_isal(), len(matrix), len(matrix[0])
    tables = ctypes.create_string_buffer(TABLE_BYTES * rows * columns)
    library.init_tables(columns, rows, b"".join(matrix), tables)
    length = len(sources[0])
    views = [(ctypes.c_char * length).from_buffer(buffer) for buffer in (*sources, *destinations)]
    addresses = [ctypes.addressof(view) for view in views]
    read = (ctypes.c_void_p * columns)(*addresses[:columns])
    written = (ctypes.c_void_p * rows)(*addresses[columns:])

    def call() -> None:
        assert views  # keeps the exported buffers alive
        library.encode_data(length, columns, rows, tables, read, written)

    return call


def zfec_calls(stripe: Stripe, zfec: Any) -> Iterator[Call]:
    """Yield the calls of zfec, which decodes its own parity, because its code is not ours."""
    code = stripe.code
    encoder, decoder = zfec.Encoder(code.k, code.n), zfec.Decoder(code.k, code.n)
    numbers = list(range(code.k, code.n))
    shards = dict(enumerate([*stripe.data, *encoder.encode(stripe.data, numbers)]))
    sources = sorted(stripe.present)[: code.k]
    read = [shards[i] for i in sources]
    assert [bytes(shard) for shard in decoder.decode(read, sources)] == [
        bytes(shard) for shard in stripe.data
    ]
    yield Call(ZFEC, ErasureTask.ENCODE, stripe.data_bytes, lambda: encoder.encode(stripe.data, numbers))
    yield Call(ZFEC, ErasureTask.DECODE, stripe.data_bytes, lambda: decoder.decode(read, sources))


def reference_calls(stripe: Stripe) -> Iterator[Call]:
    columns = min(REFERENCE_COLUMNS, stripe.length)
    codec = make_reference_codec(stripe.code)
    words = [bytes(shard[i] for shard in stripe.data) for i in range(columns)]
    erased = list(stripe.lost)
    damaged = [bytes(len(erased)) + codec.encode(word)[len(erased) :] for word in words]
    size = stripe.code.k * columns
    yield Call(REFERENCE, ErasureTask.ENCODE, size, lambda: [codec.encode(word) for word in words])
    yield Call(
        REFERENCE,
        ErasureTask.DECODE,
        size,
        lambda: [codec.decode(word, erase_pos=erased) for word in damaged],
    )


# Timing.


def measure(calls: Sequence[Call], m: int, rounds: int) -> list[ErasureTiming]:
    """Time all calls in each round, every other round in reverse, so that neighbors gain alike from a warm cache."""
    times_s: dict[int, list[float]] = {number: [] for number in range(len(calls))}
    for call in calls:
        call.run()  # the first call may compile
    for turn in range(rounds):
        for number in range(len(calls))[:: -1 if turn % 2 else 1]:
            calls[number].run()
            started_s = time.perf_counter()
            calls[number].run()
            times_s[number].append(time.perf_counter() - started_s)
    return [
        ErasureTiming(
            who=call.who, task=call.task, parity_shards=m, data_bytes=call.data_bytes, times_s=times_s[number]
        )
        for number, call in enumerate(calls)
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
