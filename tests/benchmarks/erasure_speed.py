"""How fast the erasure code is: our calls beside the bare ISA-L call, reedsolo and memory copy, in turn, in one run.

    taskset -c 0 python tests/benchmarks/erasure_speed.py [--mebibytes 8] [--rounds 7] [--codes 4+2,8+1,8+2,8+4]

GB/s of data (k times the length of a shard; GB = 10^9 bytes), the best and the median of the rounds: on a busy
machine the best is what the code can do. In a round all are timed one after the other, so that a slow moment
hits them all. Pinned to one core, because XLA uses all it sees. "MiB" is the length of a shard: large ones come
from memory, 1 from the cache. The last line is JSON, in the keys of the issue, of the first code given.
"""

import argparse
import ctypes
import json
import os
import platform
import statistics
import time
from collections.abc import Callable

from resilient_jax.erasure import KernelMissing, KernelName, ReedSolomon, decode, encode, scan, update_parity
from resilient_jax.erasure.isal_library import TABLE_BYTES, load_isal
from resilient_jax.erasure.reference import reference_codec
from resilient_jax.erasure_kernels import choose_kernel

Timed = dict[str, tuple[Callable[[], object], int]]
"""What to time, by name: a call, and the bytes of data that it takes in."""
REFERENCE_COLUMNS = 200
"""reedsolo is a thousand times slower, so it gets fewer columns."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mebibytes", type=int, default=8, help="length of a shard")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--codes", default="4+2,8+1,8+2,8+4", help="k+m, with commas between")
    options = parser.parse_args()
    kernels = available_kernels()
    cores = len(os.sched_getaffinity(0))
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {cores} cores of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}")
    print(f"shards of {options.mebibytes} MiB, {options.rounds} rounds; GB/s of data, best (median)\n")
    report: dict[str, object] = {"shard_mib": options.mebibytes, "cores": cores, "rounds": options.rounds}
    for position, text in enumerate(options.codes.split(",")):
        k, m = (int(number) for number in text.split("+"))
        speeds = measure(calls_of(ReedSolomon(k, m), kernels, options.mebibytes * 2**20), options.rounds)
        print(f"k = {k}, m = {m}")
        for name, (best, median) in speeds.items():
            print(f"  {name:<24}{best:9.3f}  ({median:.3f})")
        if position == 0:
            report |= keys_of_issue({name: best for name, (best, _) in speeds.items()})
            report |= {"k": k, "m": m, "gbps": {name: round(best, 4) for name, (best, _) in speeds.items()}}
    print(json.dumps(report))


def available_kernels():
    """Those that are here, self-tested, by name."""
    kernels = {}
    for name in KernelName:
        try:
            chosen = choose_kernel(name)
        except KernelMissing as missing:
            print(f"{name}: {missing}")
            continue
        print(f"{name}: {chosen.kernel.description}, self-test {chosen.self_test.duration_s * 1e3:.1f} ms")
        kernels[name] = chosen.kernel
    return kernels


def calls_of(code: ReedSolomon, kernels, length: int) -> Timed:
    """Everything that is timed for a code."""
    data = [bytearray(os.urandom(length)) for _ in range(code.k)]
    parity = [bytearray(length) for _ in range(code.m)]
    lost = {i: bytearray(length) for i in range(min(code.k, code.m))}
    calls: Timed = {}
    for name, kernel in kernels.items():
        encode(code, kernel, data, parity)
        stripe = dict(enumerate([*data, *parity]))
        present = {i: stripe[i] for i in stripe if i not in lost}

        def do_scan(kernel=kernel, stripe=stripe):
            assert next(scan(code, kernel, stripe), None) is None

        size = code.k * length
        calls[f"{name} encode"] = (lambda kernel=kernel: encode(code, kernel, data, parity), size)
        calls[f"{name} decode"] = (
            lambda kernel=kernel, present=present: decode(code, kernel, present, lost),
            size,
        )
        calls[f"{name} scan"] = (do_scan, size)
        # Old and new alike, so that the parity stays right; the bytes counted are those of the new shard.
        calls[f"{name} delta"] = (
            lambda kernel=kernel: update_parity(code, kernel, 0, data[0], data[0], parity),
            length,
        )
    if KernelName.ISAL in kernels:
        calls["bare ISA-L call"] = (bare_isal(code, data, parity), code.k * length)
    words = [bytes(shard[i] for shard in data) for i in range(REFERENCE_COLUMNS)]
    codec = reference_codec(code)
    calls["reedsolo encode"] = (lambda: [codec.encode(word) for word in words], code.k * REFERENCE_COLUMNS)
    target, source = memoryview(bytearray(code.k * length)), memoryview(bytearray(b"".join(data)))
    calls["memory copy"] = (lambda: target.__setitem__(slice(None), source), code.k * length)
    return calls


def bare_isal(code: ReedSolomon, data: list[bytearray], parity: list[bytearray]) -> Callable[[], object]:
    """`ec_encode_data` with everything made before: the limit for our call."""
    library = load_isal()
    tables = ctypes.create_string_buffer(TABLE_BYTES * code.k * code.m)
    library.init_tables(code.k, code.m, b"".join(code.parity_matrix), tables)
    length = len(data[0])
    views = [(ctypes.c_char * length).from_buffer(buffer) for buffer in (*data, *parity)]
    addresses = [ctypes.addressof(view) for view in views]
    sources = (ctypes.c_void_p * code.k)(*addresses[: code.k])
    destinations = (ctypes.c_void_p * code.m)(*addresses[code.k :])

    def call() -> None:
        assert views  # which keep the memory where it is
        library.encode_data(length, code.k, code.m, tables, sources, destinations)

    return call


def measure(calls: Timed, rounds: int) -> dict[str, tuple[float, float]]:
    """GB/s, best and median of the rounds, after one that does not count (compiling, first touch of memory)."""
    times_s: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, (call, _) in calls.items():
            started_s = time.perf_counter()
            call()
            if number:
                times_s[name].append(time.perf_counter() - started_s)
    return {
        name: (size / min(times_s[name]) / 1e9, size / statistics.median(times_s[name]) / 1e9)
        for name, (_, size) in calls.items()
    }


def keys_of_issue(best: dict[str, float]) -> dict[str, float]:
    """The issue's names, for the fastest kernel that is here."""
    fastest = next(name for name in KernelName if f"{name} encode" in best)
    found = {
        "encode_gbps": best[f"{fastest} encode"],
        "decode_gbps": best[f"{fastest} decode"],
        "isal_gbps": best.get("bare ISA-L call", 0.0),
        "copy_limit_gbps": best["memory copy"],
    }
    return {name: round(value, 3) for name, value in found.items()}


if __name__ == "__main__":
    main()
