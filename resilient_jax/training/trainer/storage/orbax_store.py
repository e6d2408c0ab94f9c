"""Checkpoints in Orbax's format, each written by one process alone.

Orbax expects all processes of JAX's world to save together, dead ones too. So here every process that saves or reads is
told that it is the only active one; Orbax then waits for nobody. Four things remain, seen in orbax-checkpoint 0.12.8:

- `NumpyHandler` writes nothing on processes other than 0, without a word (`if process_index() == 0`). So arrays are
  given as `jax.Array`.
- `ArrayHandler` refuses an array that lies on one process alone while there are others, dead or alive. So each array is
  labelled as replicated over this process's first device and one of another process. No program ever runs on that
  label; of a replicated array the saver writes its own copy.
- The threads of one save signal each other through JAX's coordination service, by a client that Orbax keeps for ever:
  a save would wait for a service that is dead, or of a world that was left. So they get the client that Orbax has for
  a single process.
- A cache of shardings keeps the devices of a world that was left, and all memory on them. So it is cleared.

`_apart` does the last two; it is the one place here that reaches into Orbax.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.futures import signaling_client
from orbax.checkpoint._src.serialization import replica_slices

from resilient_jax.errors import StateError
from resilient_jax.training.trainer.state import is_key

Tree = Any
"""A pytree of arrays."""
METADATA = "_METADATA"
"""Orbax's description of the tree, one of the last files of a checkpoint."""
REMEDY = "Train with the recipe that saved it, or use another directory"
TEMPORARY_MARK = ".orbax-checkpoint-tmp"
"""In the names of Orbax's checkpoints that were never finished."""


class OrbaxStore:
    """The checkpoints in one directory, each in a folder named by its step."""

    def __init__(self, directory: str | Path, keep: int) -> None:
        self._directory = Path(directory).absolute()
        self._keep = keep

    def find_newest(self) -> int | None:
        """The step of the newest complete checkpoint; None: there is none."""
        return max(self._find_complete(), default=None)

    def save(self, step: int, state: Tree) -> None:
        """Writes a checkpoint, then drops old ones and what dead savers have left. Returns when it is on storage.

        Args:
            step: how many steps are in the state. If it is saved already, nothing is done.
            state: arrays that are whole on this process's first device.
        """
        if step in self._find_complete():
            return
        sharding = _label()
        labelled = jax.tree.map(lambda leaf: _relabel(leaf, sharding), state)
        with _apart(), _checkpointer() as checkpointer:
            checkpointer.save(self._path(step), args=ocp.args.PyTreeSave(labelled), force=True)
        for old in sorted(self._find_complete())[: -self._keep]:
            # Renamed first: half of a checkpoint must not look like one.
            self._path(old).rename(self._path(old).with_name(f"{old}{TEMPORARY_MARK}-old"))
        for unfinished in self._directory.glob(f"*{TEMPORARY_MARK}*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def load(self, step: int, abstract: Tree) -> Tree:
        """The state of a checkpoint, in host memory.

        Args:
            step: of the checkpoint.
            abstract: the state's shapes.

        Raises:
            StateError: it holds another state; names a leaf.
        """
        wanted = jax.tree.map(_raw, abstract)
        arguments = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), wanted)
        with _apart(), _checkpointer() as checkpointer:
            try:
                found = checkpointer.restore(
                    self._path(step), args=ocp.args.PyTreeRestore(item=wanted, restore_args=arguments)
                )
            except (KeyError, ValueError) as error:
                raise StateError(
                    f"the checkpoint {self._path(step)}: found a state that does not fit this model and optimizer "
                    f"({str(error).splitlines()[0][:300]}). {REMEDY}"
                ) from error
        self._check(step, wanted, found)
        return jax.tree.map(_from_raw, abstract, found)

    def _check(self, step: int, wanted: Tree, found: Tree) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(wanted)
        for (path, expected), leaf in zip(leaves, jax.tree.leaves(found), strict=True):
            if (leaf.shape, leaf.dtype) != (expected.shape, expected.dtype):
                raise StateError(
                    f"the checkpoint {self._path(step)}: found {leaf.dtype}{list(leaf.shape)} at "
                    f"{jax.tree_util.keystr(path)}, expected {expected.dtype}{list(expected.shape)} as in this "
                    f"model and optimizer. {REMEDY}"
                )

    def _find_complete(self) -> list[int]:
        if not self._directory.is_dir():
            return []
        return [
            int(folder.name)
            for folder in self._directory.iterdir()
            if folder.name.isdecimal()
            and ocp.utils.is_checkpoint_finalized(folder)
            and (folder / METADATA).is_file()
        ]

    def _path(self, step: int) -> Path:
        return self._directory / str(step)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """While this lasts, Orbax needs no coordination service; afterwards it holds no device."""
    signals = signaling_client.ThreadSafeKeyValueSignalingClient()
    usual = signaling_client.get_signaling_client
    signaling_client.get_signaling_client = lambda: signals
    try:
        yield
    finally:
        signaling_client.get_signaling_client = usual
        replica_slices._sharding_num_replicas.cache_clear()


def _checkpointer() -> ocp.Checkpointer:
    """One that believes to be alone."""
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )
    arrays = ocp.type_handlers.ArrayHandler(
        primary_host=me, replica_id=0, use_replica_parallel=False, enable_write_sharding_file=False
    )
    handlers = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone, type_handler_registry=handlers)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _label() -> Sharding:
    """Where Orbax shall believe that arrays lie; this process's device comes first, so its copy is the one written."""
    mine = jax.local_devices()[0]
    others = [device for device in jax.devices() if device.process_index != jax.process_index()]
    return NamedSharding(Mesh(np.array([mine, *others[:1]]), ("process",)), P())


def _relabel(leaf: jax.Array, sharding: Sharding) -> jax.Array:
    leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
    (copy,) = (shard.data for shard in leaf.addressable_shards if shard.device == jax.local_devices()[0])
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [copy])


def _raw(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf


def _from_raw(abstract: jax.ShapeDtypeStruct, found: np.ndarray) -> Any:  # noqa: ANN401 - any array
    if not is_key(abstract):
        return found
    return jax.random.wrap_key_data(
        jnp.asarray(found), impl=str(jax.random.key_impl(jnp.empty((), abstract.dtype)))
    )
