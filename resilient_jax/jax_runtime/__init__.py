"""The only package that uses private parts of JAX: joining, interrupting and leaving worlds, and the compile cache.

This file imports neither jax nor jaxlib, so that `coordination_service` starts in 0.4 s. Import the modules:

- `worker_environment`: what an agent sets in a worker's environment before it imports jax (no jax).
- `local_gpus`: which GPUs of one machine each host of a local job gets; hosts that share one (no jax).
- `coordination_service`: the coordination service of one world as a process of its own (jaxlib only).
- `distributed`: `connect` and `disconnect`, any number of times in one OS process.
- `distributed_refusal`: refuses `jax.distributed.initialize` in a script under an agent.
- `backend_gate`: makes other threads wait for JAX's devices while there is no world.
- `world_forming`: an attempt to form a world, and `interrupt_forming` for the guard thread.
- `gloo`: which sockets are gloo's (no jax).
- `clique_interruption`: ends the wait of a first collective for peers that never arrive.
- `clique_connections`: which connections an abort spares: of the local devices, of earlier members, and of replicas
  on several hosts that are all alive.
- `live_nodes`: the barrier from which XLA knows the members; `coordination_service` is told of a death.
- `spare_seats`, `local_topology`: seats for processes that join a world later (jaxlib only; no jax).
- `live_processes`: JAX counts the members of a generation alone.
- `abort`: `abort_collectives`, for the guard thread (no jax).
- `abandoned_threads`: threads left in C++, joined at the end (no jax).
- `collective_thread`: runs collectives on a thread that can be given up.
- `compilation_state`: which threads compile.
- `jaxlib_types`: the one import of jaxlib's extension module.
- `failures`: `is_collective_failure` and the errors of this package (jaxlib only).
- `compile_cache`: a persistent compilation cache that every process writes and hits.

Private parts used, and why a public one does not do:

==============================================  =====================================================
`jaxlib._jax.get_distributed_runtime_service`   a service outside process 0, with `recoverable=True`
`jaxlib._jax.get_distributed_runtime_client`    a second client in one process (`jax.distributed
                                                .initialize` refuses), a day's heartbeat; stand-ins
its `get_live_nodes`                            XLA learns incarnations from it, and from nothing else
`jax._src.distributed.global_state`             where JAX, Orbax and multihost_utils look the client up
`jaxlib._jax.make_gloo_tcp_collectives`         the address that gloo binds; its listening port
`jax._src.xla_bridge.make_cpu_client`           the CPU backend on those collectives
`jax._src.xla_bridge._backend_factories`        to put that backend where JAX finds it, and take it back
`jax._src.xla_bridge._backends`                 to see after `disconnect` whether the old one is gone
`jax._src.interpreters.partial_eval             so that a re-form compiles again, but does not trace
.trace_to_jaxpr`, `jax._src.util._caches`       again
keys `cpu:global_topology/`, `cpu:gloo/`        to end waits of a world that will never be complete
`cpu:local_topology/`, `LocalTopologyProto`     devices of seats that no process has taken yet
`jaxlib._jax.{Client,Device}`: devices,         what JAX counts: members alone, neither dead processes nor
device_count, process_index                     empty seats
the layout of gloo's published address          the same, for a connection that never arrives
`jax._src.{compiler,compilation_cache,          every process writes the persistent cache, under a key
cache_key}`                                     that does not depend on its process index
`jax._src.compiler.compile_or_get_cached`       which threads compile, without a look at their stacks
`jax._src.lax.lax._convert_element_type`        makes an array weakly typed again (`state.leaf_kinds`); public
                                                functions do so for scalars of two dtypes only
==============================================  =====================================================
"""

TESTED_VERSIONS: tuple[str, ...] = ("0.10.2", "0.12.0")
"""Versions of jax that the tests of this package have run on."""
