"""What all hosts have found in a step is given to a host that runs the step again, call by call."""

import jax.numpy as jnp
import numpy as np
import pytest

from resilient_jax.errors import PeerUnreachable
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.state.flat_state import FlatState
from resilient_jax.state.peer_transfer import StateOffer, WorkerReader
from resilient_jax.state.restore import read_whole_state
from resilient_jax.transport import Credentials
from resilient_jax.worker.step_results import COMMITTED, REDUCED, RESULTS_NUMBER, StepResults

HOST, GENERATION = HostName("a"), GenerationNumber(3)


def read(offer: StateOffer) -> FlatState:
    """Read an offer as another host does, but from memory."""
    with WorkerReader(
        GENERATION, [], Credentials("token"), lambda: None, lambda *_: None, offer, number=RESULTS_NUMBER
    ) as reader:
        return read_whole_state(reader)


def find_results() -> StepResults:
    """Return the results of a host that has committed step 4, and has begun the next one."""
    found = StepResults()
    found.begin()
    found.begin_step(4)
    found.add("evaluate", [jnp.float32(7)])
    found.add("train", [jnp.float32(1.5), np.array([0, 1, 0], np.int32)])
    found.add(REDUCED, [np.float32(2.5)])
    found.add(COMMITTED, [])
    found.begin_step(5)
    return found


def test_a_step_gets_what_others_found_in_it_in_the_order_of_the_calls() -> None:
    mine = StepResults()
    mine.begin()
    mine.add(REDUCED, [np.int32(3)])
    mine.begin_step(4)
    repeated = mine.make_repeated(read(find_results().offer(HOST, GENERATION, 4)))
    assert repeated.take_reduced([np.int32(0)]) == (3,), "before the step each has its own results"
    repeated.is_step_begun = True
    # The script may have evaluated in the first try alone.
    loss, owners = repeated.take_sum("train")
    assert loss == np.float32(1.5)
    assert owners.tolist() == [0, 1, 0]
    with pytest.raises(PeerUnreachable, match="found no result of its commit"):
        repeated.require_all_taken()
    assert repeated.take_reduced([0.5]) == (np.float32(2.5),), "as it is summed"
    repeated.require_all_taken()
    # And it may be what this host tells others next.
    assert read(mine.offer(HOST, GENERATION, 4)).leaves


def test_calls_that_others_did_not_make_are_an_error_after_which_a_snapshot_is_read() -> None:
    of_others = read(find_results().offer(HOST, GENERATION, 4))
    repeated = StepResults().make_repeated(of_others)
    repeated.is_step_begun = True
    with pytest.raises(PeerUnreachable, match="found no result of its all_reduce"):
        repeated.take_reduced([np.zeros(2, np.float32)])
    with pytest.raises(PeerUnreachable, match="found no result of its accumulation 'other'"):
        StepResults().make_repeated(of_others).take_sum("other")


def test_only_the_last_two_steps_are_kept_and_none_whose_arrays_were_donated() -> None:
    found = find_results()
    assert not read(found.offer(HOST, GENERATION, 3)).leaves
    donated = jnp.ones(3)
    found.add("train", [donated])
    assert not read(found.offer(HOST, GENERATION, 4)).leaves, "all hosts have begun the next step"
    found.begin_step(6)
    donated.delete()
    assert not read(found.offer(HOST, GENERATION, 5)).leaves
    found.move_to_host()  # and is no error where the devices are left
    assert not read(found.offer(HOST, GENERATION, 5)).leaves
