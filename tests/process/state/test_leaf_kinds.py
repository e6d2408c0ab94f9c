"""Each leaf comes back as it was from a peer's memory over sockets, and from storage by another process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.checkpoint.stored_tree import check_storable
from resilient_jax.errors import StateError
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.state_records import StateSource
from resilient_jax.state.flat_state import copy_to_host, flatten_state, make_abstract_state
from resilient_jax.state.leaf_kinds import DTYPES_OUTSIDE_STORAGE
from resilient_jax.state.peer_transfer import StateOffer, StateOffers, StateServer, WorkerReader
from resilient_jax.state.restore import read_whole_state
from resilient_jax.state.state_placement import place_initial_state, restore_state
from resilient_jax.transport.credentials import Credentials
from tests.support.leaf_kinds import assert_same_kinds, make_state
from tests.support.whole_checkpoints import WholeStore

CREDENTIALS = Credentials("secret")
NUMBER = GenerationNumber(4)
WIDTHS = pytest.mark.parametrize("x64", [False, True], ids=["x64 off", "x64 on"])


def replicated():
    return NamedSharding(Mesh(np.array(jax.devices()[:1]), ("x",)), P())


@pytest.fixture
def server():
    offers = StateOffers()
    server = StateServer("127.0.0.1", CREDENTIALS, offers)
    yield offers, server.endpoint
    server.close()


@pytest.fixture
def store(tmp_path):
    store = WholeStore(tmp_path / "checkpoints", max_to_keep=1)
    yield store
    store.close()


@WIDTHS
@pytest.mark.parametrize("rule", [None, replicated], ids=["kept", "placed"])
def test_a_host_that_joins_gets_each_leaf_as_the_others_have_it(server, rule, x64):
    with jax.enable_x64(x64):
        state = make_state()
        offers, endpoint = server
        offers.offer(StateOffer.of_state(HostName("a"), NUMBER, copy_to_host(flatten_state(17, state))))
        source = StateSource(host=HostName("a"), endpoint=endpoint)
        with WorkerReader(NUMBER, [source], CREDENTIALS, lambda: None, lambda *refused: None) as reader:
            found = read_whole_state(reader)
        assert_same_kinds(restore_state(make_abstract_state(lambda: state), found, rule and rule()), state)


def list_stored():
    """Return the leaves that a checkpoint may have: no string, and no dtype that Orbax does not know."""
    outside = ("string", *(f"jax {dtype}" for dtype in DTYPES_OUTSIDE_STORAGE))
    return {name: leaf for name, leaf in make_state().items() if name not in outside}


@WIDTHS
def test_a_checkpoint_gives_numbers_and_numpy_arrays_back_as_they_were(store, x64):
    with jax.enable_x64(x64):
        state = {name: leaf for name, leaf in list_stored().items() if not isinstance(leaf, jax.Array)}
        store.save(1, state)
        assert_same_kinds(store.load(1, make_abstract_state(lambda: state)), state)


@WIDTHS
def test_a_checkpoint_is_placed_as_the_initial_state_is(store, x64):
    with jax.enable_x64(x64):
        placed = {}
        for name, leaf in list_stored().items():
            try:
                placed |= place_initial_state({name: leaf}, replicated())
            except StateError:
                assert not x64, "with 64 bits everything fits"
        store.save(1, placed)
        state = {name: leaf for name, leaf in list_stored().items() if name in placed}
        found = store.load(1, make_abstract_state(lambda: state), replicated())
        assert_same_kinds(found, placed)


def test_a_checkpoint_that_a_sharding_would_narrow_is_refused(store):
    state = {"w": np.ones(3)}
    store.save(1, state)
    with pytest.raises(StateError, match=r"leaf w is a NumPy array of float64\[3\] with a sharding"):
        store.load(1, make_abstract_state(lambda: state), replicated())
    with pytest.raises(StateError, match=r"found float64\[3\] at w instead of float32\[3\]"):
        store.load(1, make_abstract_state(lambda: {"w": jnp.ones(3)}), replicated())


@pytest.mark.parametrize("dtype", ["uint2", "uint4", "float8_e4m3"])
def test_a_dtype_that_storage_does_not_have_is_refused_before_the_first_step(dtype):
    state = {"layers": [jnp.zeros(3, dtype)]}
    with pytest.raises(
        StateError, match=rf"found {dtype} at \['layers'\]\[0\], expected a dtype that Orbax can write"
    ):
        check_storable(make_abstract_state(lambda: state))


def test_what_a_checkpoint_cannot_give_back_is_refused_when_it_is_saved(store):
    with pytest.raises(StateError, match=r"leaf \['name'\] is a str"):
        store.try_save(1, {"name": "adam", "w": jnp.ones(3)})
