"""What every part of an agent works with: its settings, the store, the clock, the event log and the console."""

import dataclasses
import uuid
from collections.abc import Callable

from resilient_jax.clock import Clock
from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.host_devices import HostDevices
from resilient_jax.cluster.script_admission import ScriptAdmission
from resilient_jax.store.interface import Store
from resilient_jax.telemetry.event_log import EventLog


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AgentContext:
    """The surroundings of one agent's parts.

    Attributes:
        print_line: prints a line for people.
        agent_id: id that is new with each start of the agent.
        admission: admission of this host's workers, with the program that they run.
    """

    settings: AgentSettings
    store: Store
    clock: Clock
    log: EventLog
    print_line: Callable[[str], None]
    agent_id: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    devices: HostDevices = dataclasses.field(init=False)
    admission: ScriptAdmission = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", HostDevices(self.settings))
        object.__setattr__(self, "admission", ScriptAdmission(self.store, self.settings, self.agent_id))
