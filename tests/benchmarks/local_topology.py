"""Measure the figures of `meshes/local_*.toml`: the share of one of several "hosts" on one machine, all busy at once.

    python tests/benchmarks/local_topology.py --hosts 4

The output is one line of JSON. Compute: a matrix product on all cores. Memory: copies on all cores. Links between
hosts: a ring of one process per host, each sending to the next over TCP on the loopback while it receives from the one
before. Each figure is the median of `--repeats` runs, with the smallest and the largest beside it.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import jax
import jax.numpy as jnp
import numpy as np
import psutil

MATRIX = 2048
"""Rows and columns: 50 MB of operands in fp32, more than fits into the caches, and 17 GFLOP."""
COPIED_BYTES = 256 * 2**20
SENT_BYTES = 256 * 2**20
CHUNK_BYTES = 2**20
ROUND_TRIPS = 2000


def measure_flops_per_s(dtype: str, repeats: int) -> list[float]:
    """Return the FLOP/s of a square matrix product, for each repeat."""
    product = jax.jit(jnp.matmul)
    left = jax.random.normal(jax.random.key(0), (MATRIX, MATRIX), dtype=dtype)
    product(left, left).block_until_ready()
    return [2 * MATRIX**3 / _time(lambda: product(left, left).block_until_ready()) for _ in range(repeats)]


def measure_copied_bytes_per_s(repeats: int) -> list[float]:
    """Return the bytes per second that one thread per core copies, each byte read once and written once."""
    cores = os.cpu_count() or 1
    arrays = [(np.ones(COPIED_BYTES, np.uint8), np.ones(COPIED_BYTES, np.uint8)) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as pool:

        def copy_all() -> None:
            list(pool.map(lambda pair: np.copyto(*pair), arrays))

        copy_all()
        return [cores * COPIED_BYTES / _time(copy_all) for _ in range(repeats)]


def measure_ring(hosts: int, repeats: int) -> list[float]:
    """Return the bytes per second that each host of a ring sends and receives at once: the slowest host of each run."""
    runs = []
    for _ in range(repeats):
        rates = _run_hosts(hosts, _send_and_receive)
        runs.append(min(rates))
    return runs


def measure_latency_s(repeats: int) -> list[float]:
    """Return half the round-trip time of one byte between two otherwise idle hosts, for each repeat."""
    return [max(_run_hosts(2, _bounce)) for _ in range(repeats)]


def _time(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _run_hosts(hosts: int, work: Callable[..., None]) -> list[float]:
    """Run `work` in one process per host, connected in a ring, and return what each process measured."""
    context = get_context("spawn")
    results, barrier = context.Queue(), context.Barrier(hosts)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(hosts)]
    ports = [listener.getsockname()[1] for listener in listeners]
    processes = [
        context.Process(
            target=work, args=(index, listeners[index], ports[(index + 1) % hosts], barrier, results)
        )
        for index in range(hosts)
    ]
    for process in processes:
        process.start()
    measured = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    for listener in listeners:
        listener.close()
    return measured


def _connect(listener: socket.socket, port: int) -> tuple[socket.socket, socket.socket]:
    following = socket.create_connection(("127.0.0.1", port))
    before, _ = listener.accept()
    for line in (following, before):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return following, before


def _send_and_receive(index: int, listener: socket.socket, port: int, barrier, results) -> None:
    following, before = _connect(listener, port)
    chunk, place = bytes(CHUNK_BYTES), bytearray(CHUNK_BYTES)

    def send() -> None:
        for _ in range(SENT_BYTES // CHUNK_BYTES):
            following.sendall(chunk)

    sender = threading.Thread(target=send)
    barrier.wait()
    start = time.perf_counter()
    sender.start()
    left = SENT_BYTES
    while left:
        left -= before.recv_into(place, min(left, CHUNK_BYTES))
    sender.join()
    results.put(SENT_BYTES / (time.perf_counter() - start))


def _bounce(index: int, listener: socket.socket, port: int, barrier, results) -> None:
    following, before = _connect(listener, port)
    barrier.wait()
    start = time.perf_counter()
    for _ in range(ROUND_TRIPS):
        if index == 0:
            following.sendall(b"x")
            before.recv(1)
        else:
            before.recv(1)
            following.sendall(b"x")
    results.put((time.perf_counter() - start) / ROUND_TRIPS / 2)


def _summarize(values: list[float]) -> dict[str, float]:
    digits = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: float(f"{value:.3g}") for name, value in digits.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    figures = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {psutil.virtual_memory().total} bytes of memory",
        "hosts": options.hosts,
        "repeats": options.repeats,
        "machine_fp32_flops_per_s": _summarize(measure_flops_per_s("float32", options.repeats)),
        "machine_bf16_flops_per_s": _summarize(measure_flops_per_s("bfloat16", options.repeats)),
        "machine_copied_bytes_per_s": _summarize(measure_copied_bytes_per_s(options.repeats)),
        "host_bandwidth_bytes_per_s": _summarize(measure_ring(options.hosts, options.repeats)),
        "host_latency_s": _summarize(measure_latency_s(options.repeats)),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
