"""Arrays of a step wait in host memory for new devices, as they are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from resilient_jax.ids import HostName
from resilient_jax.pipeline.boundary_log import BoundaryLog
from resilient_jax.pipeline.host_copies import ArrayCopy, can_copy, copy_to_host, place_copies
from resilient_jax.pipeline.stage_runner import StageRunner
from resilient_jax.pipeline_schedule.tasks import Boundary, BoundaryKind
from resilient_jax.sharding.stage_sharding import make_single_device_stage


def test_arrays_and_random_keys_come_back_as_they_were():
    """On several devices: `tests/process/pipeline/test_pipeline.py`."""
    sharding = make_single_device_stage()
    tree: Any = {
        "x": jax.device_put(np.arange(8.0, dtype=np.float32), sharding.place(P("fsdp"))),
        "flag": jax.device_put(np.array(True), sharding.place(P())),
        "key": jax.device_put(jax.random.key(3), sharding.place(P())),
        "half": jax.device_put(np.ones((2, 4), jnp.bfloat16), sharding.place(P(None, "fsdp"))),
    }
    assert can_copy(tree)
    copies = copy_to_host(tree)
    assert all(isinstance(copy, ArrayCopy) for copy in jax.tree.leaves(copies))
    found = place_copies(copies, sharding)
    for name, array in tree.items():
        assert found[name].sharding == array.sharding
        assert found[name].dtype == array.dtype
    assert jax.random.uniform(found["key"]) == jax.random.uniform(tree["key"])
    assert np.array_equal(np.asarray(found["x"]), np.asarray(tree["x"]))
    assert np.array_equal(np.asarray(found["half"]), np.asarray(tree["half"]))


def test_a_value_that_was_sent_keeps_no_array():
    log, boundary = BoundaryLog(100), Boundary(BoundaryKind.ACTIVATION, 0, 1)
    array = jnp.arange(4, dtype=jnp.uint8)
    log.record(boundary, np.asarray(array).data)
    log.move_to_host()
    found = log.get(boundary)
    assert found is not None
    assert not np.shares_memory(np.asarray(found), np.asarray(array))
    assert bytes(found) == bytes(range(4))
    assert log._bytes_held == 4


def test_what_a_failed_task_has_left_cannot_be_copied():
    """The step is dropped then."""
    unused: Any = None
    runner = StageRunner(HostName("a"), unused, BoundaryLog(0), unused, make_single_device_stage())
    runner._results[0, 0] = {"sound": jnp.ones(2), "broken": jnp.zeros(2)}
    assert runner.move_to_host()
    runner.place(make_single_device_stage())
    runner._results[0, 0]["broken"].delete()
    assert not runner.move_to_host()
