"""A process that executes a test's orders with `jax_runtime`; its argument is a folder for compiled programs, or empty.

Orders are JSON lines on stdin, executed in order on the main thread, each answered by a JSON line on stdout. The
reading thread acts as the guard: it executes `interrupt` at once, and repeats the interruption every 20 ms until the
main thread has answered its current order. A collective of `exchange` that has not returned by then is given up.
"""

import dataclasses
import functools
import json
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import distributed as jax_distributed
from jax._src.interpreters import mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.ids import Seat
from resilient_jax.jax_runtime import distributed, live_nodes, live_processes, world_forming
from resilient_jax.jax_runtime.clique_connections import CliqueConnections
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.jax_runtime.compile_cache import share_compilation_cache
from resilient_jax.jax_runtime.failures import is_collective_failure
from resilient_jax.jax_runtime.gloo import GlooSockets
from resilient_jax.jax_runtime.jaxlib_types import RuntimeClient
from resilient_jax.jax_runtime.lowering_cache import keep_lowerings
from resilient_jax.jax_runtime.world_forming import WorldSeat
from tests.support.null_cache_hooks import NullCacheHooks

orders: queue.Queue[dict] = queue.Queue()
interrupting = threading.Lock()
"""Taken to interrupt and to answer, so that no interruption hits the next order."""
GIVE_UP_AFTER_S = 0.5
answered = 0
state: dict = {
    "connection": None,
    "cliques": None,
    "kept": None,
    "hits": 0,
    "missed": [],
    "users": [],
    "traces": 0,
    "lowerings": 0,
    "compiler": None,
    "uses": 0,
    "failures": [],
    "place": None,
}


def guard() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "interrupt":
            threading.Thread(target=interrupt, args=(answered,), daemon=True).start()
        elif order["do"] == "break_replica":
            threading.Thread(target=break_replica, daemon=True).start()
        else:
            orders.put(order)
    os._exit(0)


def break_replica() -> None:
    """Break the cliques of the replica whose program runs off, as soon as one does."""
    while not state["cliques"].break_program(state["connection"].gloo):
        time.sleep(0.005)


def interrupt(while_answered: int) -> None:
    began = time.monotonic()
    while True:
        with interrupting:
            if answered != while_answered:
                return
            world_forming.interrupt_forming()
            live_nodes.interrupt_meeting()
            if state["connection"] is not None:
                state["cliques"].abort(state["connection"].gloo)
            if time.monotonic() - began > GIVE_UP_AFTER_S:
                collective_thread.give_up()
        time.sleep(0.02)


def main() -> None:
    if cache_dir := sys.argv[1]:
        jax.config.update("jax_compilation_cache_dir", cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    keep_and_count_lowerings()
    jax.monitoring.register_event_listener(count_hit)
    threading.Thread(target=guard, daemon=True).start()
    answer(pid=os.getpid())
    while True:
        order = orders.get()
        began = time.monotonic()
        try:
            found = ORDERS[order.pop("do")](**order)
        except Exception as error:
            found = {
                "error": type(error).__name__,
                "text": str(error)[:300],
                "collective": is_collective_failure(error),
            }
        answer(seconds=time.monotonic() - began, **(found or {}))


def answer(**words: object) -> None:
    global answered
    with interrupting:
        answered += 1
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def count_hit(event: str, **_: object) -> None:
    state["hits"] += event == "/jax/compilation_cache/cache_hits"


def connect(address: str, index: int, count: int, timeout_s: float = 20, seats: int | None = None) -> dict:
    """Form a world of `count` processes with `seats` seats, by default as many."""
    members = tuple(Seat(seat) for seat in range(count))
    place = WorldSeat(address=address, seat=Seat(index), num_seats=seats or count, members=members)
    return take_place(place, timeout_s)


def take_seat(address: str, seat: int, seats: int, members: list[int]) -> dict:
    """Take a spare seat of a world in which `members` train."""
    found = take_place(WorldSeat(address=address, seat=Seat(seat), num_seats=seats, members=()), 20)
    live_processes.set_members([Seat(member) for member in (*members, seat)])
    return found


def take_place(place: WorldSeat, timeout_s: float) -> dict:
    state["connection"] = None
    state["cliques"] = CliqueConnections(place.seat)
    state["connection"] = distributed.connect(place, timeout_s=timeout_s, bind_host="127.0.0.1")
    world_forming.limit_interruption(state["cliques"].is_current)
    state["cliques"].form_local_clique(state["connection"].gloo)
    if place.members:
        begin([int(seat) for seat in place.members])
    return {"devices": len(jax.devices())}


def begin(members: list[int]) -> dict:
    """Begin a generation of these seats; return what JAX counts."""
    connection = state["connection"]
    seats = tuple(Seat(member) for member in members)
    live_processes.set_members(seats)
    gloo = dataclasses.replace(
        connection.gloo, peer_listeners=distributed.read_peer_listeners(seats, connection.place.seat, 10)
    )
    state["cliques"].begin(seats)
    state["connection"] = dataclasses.replace(connection, gloo=gloo)
    return {
        "processes": jax.process_count(),
        "index": jax.process_index(),
        "devices": jax.device_count(),
        "local": len(jax.local_devices()),
        "indices": sorted({device.process_index for device in jax.devices()}),
        "broken": state["cliques"].is_broken(seats),
    }


def end(is_intact: bool) -> None:
    """End a generation."""
    state["cliques"].end(state["connection"].gloo, is_intact=is_intact)


def register(address: str, seat: int, seats: int) -> None:
    """Register with the service, without a backend."""
    client, _ = world_forming.new_client(address, Seat(seat), 20)
    client.connect()
    jax_distributed.global_state.client = client
    state["place"] = WorldSeat(address=address, seat=Seat(seat), num_seats=seats, members=())


def meet_members(members: list[int], timeout_s: float = 20) -> dict:
    """Meet these seats; return how many threads wait in meetings that were left."""
    live_nodes.meet_members(state["place"], [Seat(member) for member in members], timeout_s)
    return {"waiting": live_nodes.count_waiting_threads()}


def end_waiting_threads() -> dict:
    """End the threads of meetings that were left; return how many are left of them."""
    live_nodes.end_waiting_threads(state["place"])
    jax_distributed.global_state.client = None
    return {"waiting": live_nodes.count_waiting_threads()}


def register_and(signal_number: int, address: str, index: int, count: int) -> None:
    """Register with the service, publish the gloo listeners, then send this process the signal."""
    client, _ = world_forming.new_client(address, Seat(index), 20)
    client.connect()
    client.key_value_set(f"{world_forming.GLOO_LISTENERS_KEY}/{index}", '[["127.0.0.1", 1]]')
    os.kill(os.getpid(), signal_number)


def publish_and(signal_number: int) -> None:
    """Publish this process's addresses for the clique of all devices, then send this process the signal."""
    connection = state["connection"]
    client: RuntimeClient = jax_distributed.global_state.client
    ((host, port),) = connection.gloo.own_listeners
    address = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(host)
    address = address.ljust(128, b"\0") + struct.pack("<q", -1)
    clique = ",".join(str(device.id) for device in jax.devices())
    for device in jax.local_devices():
        rank = jax.devices().index(device)
        numbers = struct.pack(
            f"<{len(jax.devices())}Q", *(1000 * (rank + 1) + i for i in range(len(jax.devices())))
        )
        value = struct.pack("<Q", 2) + b"vm" + struct.pack("<Q", len(address)) + address + numbers
        client.key_value_set_bytes(f"cpu:gloo/{clique}/{rank}", value)
    os.kill(os.getpid(), signal_number)


def array_over(devices: list) -> jax.Array:
    sharding = NamedSharding(Mesh(np.array(devices), ("d",)), P("d"))
    return jax.make_array_from_callback(
        (len(devices),), sharding, lambda index: np.arange(1.0, len(devices) + 1, dtype=np.float32)[index]
    )


def total(values: jax.Array, devices: list) -> float:
    sharding = NamedSharding(Mesh(np.array(devices), ("d",)), P())
    return float(jax.jit(lambda x: x.sum(), out_shardings=sharding)(values))


def reduce(without: int | None = None) -> dict:
    """Return the sum of 1, 2, ... over the devices of all processes but `without`."""
    devices = [device for device in jax.devices() if device.process_index != without]
    return {"total": total(array_over(devices), devices)}


def reduce_in_replica(seats: list[int]) -> dict:
    """Return the sum of 1, 2, ... over the devices of these seats, in a program of a replica."""
    cliques, gloo, is_intact = state["cliques"], state["connection"].gloo, False
    replica = frozenset(Seat(seat) for seat in seats)
    cliques.begin_program(replica, gloo)
    try:
        devices = [device for device in jax.devices() if live_processes.get_seat(device) in replica]
        found = {"total": total(array_over(devices), devices)}
        is_intact = True
    finally:
        cliques.end_program(gloo, is_intact=is_intact)
    return found


def exchange(elements: int) -> dict:
    """Send `elements` floats from each device to each device; return the sum over the shards of this process."""
    mesh = Mesh(np.array(jax.devices()), ("d",))

    def swap(rows: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(rows, "d", 0, 0, tiled=True)

    swap_all = jax.jit(jax.shard_map(swap, mesh=mesh, in_specs=P("d"), out_specs=P("d")))
    rows = jax.make_array_from_callback(
        (len(jax.devices()) ** 2, elements),
        NamedSharding(mesh, P("d")),
        lambda index: np.ones((len(jax.devices()), elements), np.float32),
    )
    found = collective_thread.run(swap_all, rows)
    return {
        "sum": sum(float(np.asarray(shard.data).sum(dtype=np.float64)) for shard in found.addressable_shards)
    }


def keep() -> None:
    """Make an array over all devices and keep this process's shards of it."""
    state["kept"] = [shard.data for shard in array_over(jax.devices()).addressable_shards]


def reduce_kept(without: int) -> dict:
    """Return the sum of the survivors' kept shards, on the survivors' mesh: no copy, no new backend."""
    devices = [device for device in jax.devices() if device.process_index != without]
    sharding = NamedSharding(Mesh(np.array(devices), ("d",)), P("d"))
    values = jax.make_array_from_single_device_arrays((len(devices),), sharding, state["kept"])
    return {"total": total(values, devices)}


def rotate(over: list[tuple[int, int]] | None = None) -> dict:
    """Send each device its neighbor's value, scaled by a power of its index: any permutation changes the result.

    Args:
        over: (process, index within it) of each device, in order; default: the devices of this process.

    Returns:
        values: values of this process's devices by index in `over`. hits: compilation cache hits.
    """
    own: dict[int, list] = {}
    for device in jax.devices():
        own.setdefault(device.process_index, []).append(device)
    devices = jax.local_devices() if over is None else [own[process][place] for process, place in over]
    before = state["hits"]
    turned = make_rotation(devices)(array_over(devices))
    shards = turned.addressable_shards
    return {
        "values": {shard.index[0].start: float(shard.data[0]) for shard in shards},
        "places": [shard.device == devices[shard.index[0].start] for shard in shards],
        "hits": state["hits"] - before,
    }


def rotate_ahead() -> dict:
    """Compile what `rotate` will run over the members and the process that takes the next seat."""
    spare = live_processes.list_spare_devices()
    index = spare[0].process_index
    devices = [*jax.devices(), *(device for device in spare if device.process_index == index)]
    where = NamedSharding(Mesh(np.array(devices), ("d",)), P("d"))
    make_rotation(devices).lower(jax.ShapeDtypeStruct((len(devices),), np.float32, sharding=where)).compile()
    return {"devices": len(devices)}


def make_rotation(devices: list) -> Any:
    count = len(devices)

    def turn(value: jax.Array) -> jax.Array:
        got = jax.lax.ppermute(value, "d", [(place, (place + 1) % count) for place in range(count)])
        return got * (10.0 ** jax.lax.axis_index("d"))

    mesh = Mesh(np.array(devices), ("d",))
    return jax.jit(jax.shard_map(turn, mesh=mesh, in_specs=P("d"), out_specs=P("d")))


@jax.jit
def doubled(value: jax.Array) -> jax.Array:
    state["traces"] += 1
    return 2 * value


def count_traces() -> dict:
    """Run a local program and an operation outside of it; return how often they have been traced and lowered."""
    jax.lax.cosh(doubled(np.float32(1)))
    return {"traces": state["traces"], "lowerings": state["lowerings"]}


def keep_and_count_lowerings() -> None:
    original = mlir.lower_jaxpr_to_module

    @functools.wraps(original)
    def count(module_name: str, *arguments: Any, **more: Any) -> Any:
        state["lowerings"] += "doubled" in module_name or "cosh" in module_name
        return original(module_name, *arguments, **more)

    mlir.lower_jaxpr_to_module = count
    assert keep_lowerings() is None


def begin_compiling(turns: int) -> None:
    """Start a thread that compiles programs over all devices, `turns` of them or until `end_compiling`."""
    ended, begun = threading.Event(), threading.Event()
    where = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), P())

    def work() -> None:
        for turn in range(turns):
            if ended.is_set():
                return
            begun.set()
            shape = jax.ShapeDtypeStruct((turn + 2, 4), np.float32, sharding=where)
            jax.jit(lambda x: (x * x).sum() + x).lower(shape).compile()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begun.wait()
    state["compiler"] = (thread, ended)


def end_compiling() -> None:
    thread, ended = state["compiler"]
    state["compiler"] = None
    ended.set()
    thread.join()


def begin_using() -> None:
    """Start a thread that uses JAX all the time, as a thread that reads data may."""

    def work() -> None:
        while True:
            try:
                np.testing.assert_array_equal(jax.random.key_data(jax.random.key(1)), [0, 1])
            except Exception as error:
                state["failures"].append(f"{type(error).__name__}: {error}"[:300])
            state["uses"] += 1

    threading.Thread(target=work, daemon=True).start()


def end_worlds() -> dict:
    """Close the backend gate as a worker does at its end: the user may continue to use JAX, on any thread."""
    distributed.close_backend_gate()
    return {"devices": len(jax.devices())}


def count_uses() -> dict:
    """Return how often the thread of `begin_using` has used JAX, and its failures."""
    return {"uses": state["uses"], "failures": state["failures"]}


def disconnect(is_borrowed: bool = False) -> dict:
    connection, state["connection"], state["kept"] = state["connection"], None, None
    gloo = connection.gloo if connection is not None else GlooSockets()
    left = distributed.disconnect(gloo, is_backend_in_use=is_borrowed)
    return {"backends": left.backends, "clients": left.clients}


def measure() -> dict:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def meet() -> None:
    """Wait for all processes before leaving a healthy world: leaving breaks the collectives of slower processes."""
    client: RuntimeClient = jax_distributed.global_state.client
    client.wait_at_barrier("leave", 20_000)


def open_user_sockets(port: int) -> None:
    """Open, as a user would, a connection to `port`, a listener, and a connection to that listener."""
    out = socket.create_connection(("127.0.0.1", port))
    listener = socket.create_server(("127.0.0.1", 0))
    inner = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    state["users"] = [out, listener, inner, accepted]


def use_user_sockets() -> dict:
    out, listener, inner, accepted = state["users"]
    out.sendall(b"log line\n")
    inner.sendall(b"x")
    again = socket.create_connection(listener.getsockname())
    again.close()
    return {"inner": accepted.recv(1).decode()}


_made: list[Callable[[], object]] = []
"""Weak references to all clients of this process, those of abandoned attempts and of leaked worlds included."""
_make_client = world_forming.new_client


def _note_client(*args: Any, **options: Any) -> tuple[Any, Callable[[], object]]:
    client, reference = _make_client(*args, **options)
    _made.append(reference)
    return client, reference


world_forming.new_client = _note_client


def count_clients() -> dict:
    return {"clients": sum(reference() is not None for reference in _made)}


class CountingHooks(NullCacheHooks):
    """Keeps the names of the programs that had to be compiled."""

    def missed(self, key: str, seconds: float) -> None:
        state["missed"].append(key.rpartition("-")[0])


def share_cache() -> dict:
    return {"warning": share_compilation_cache(CountingHooks(), 2**30)}


def list_missed() -> dict:
    """Return the names of the programs that had to be compiled since the last call."""
    missed, state["missed"] = state["missed"], []
    return {"missed": missed}


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ORDERS = {
    function.__name__: function
    for function in (
        connect,
        take_seat,
        begin,
        end,
        register,
        meet_members,
        end_waiting_threads,
        register_and,
        publish_and,
        reduce,
        reduce_in_replica,
        exchange,
        keep,
        reduce_kept,
        rotate,
        rotate_ahead,
        count_traces,
        begin_compiling,
        end_compiling,
        begin_using,
        end_worlds,
        count_uses,
        disconnect,
        meet,
        open_user_sockets,
        use_user_sockets,
        count_clients,
        measure,
        share_cache,
        list_missed,
        kill_self,
    )
}
