"""A `World` of one host without an agent, in the test's own process."""

import jax

from resilient_jax.ids import GenerationNumber, HostName, ProcessIndex
from resilient_jax.step.reducer import Reducer
from resilient_jax.worker.committed_state import CommittedState
from resilient_jax.worker.generation_info import GenerationInfo
from resilient_jax.worker.session import Session
from resilient_jax.worker.standalone import StandaloneControl
from resilient_jax.worker.world import World


def make_world(*, loss=None, committed=None, observers=(), generation=3):
    host = HostName("a")
    info = GenerationInfo(
        number=GenerationNumber(generation),
        hosts=(host,),
        process_index=ProcessIndex(0),
        change="reform",
        reason="a test",
        state_loss=loss,
    )
    committed, control = committed or CommittedState(), StandaloneControl(host)
    session = Session(committed, control, state_loss=loss, observers=observers)
    reducer = Reducer(jax.devices, info.process_index, committed.contributions, session)
    return World(info, session, control, reducer)
