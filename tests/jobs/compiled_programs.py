"""What the hosts of a real job compile, ahead of a change and after it, from their events."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from resilient_jax.cluster.launcher import TOKEN_VARIABLE
from resilient_jax.cluster.run_directory import read_contact
from resilient_jax.events import Event, EventKind
from tests.support.agents import HandStartedAgent
from tests.support.patient_job import PatientJob


def wait_compiled_ahead(
    job: PatientJob, hosts: Iterable[str], worlds: Iterable[str], timeout_s: float
) -> None:
    """Wait until these hosts have compiled ahead for these worlds, by their names in the events."""
    wanted = {(host, world) for host in hosts for world in worlds}

    def has_all() -> bool | None:
        events = job.read_events()
        found = {(e.host, e.detail["world"]) for e in events if e.kind is EventKind.PROGRAM_COMPILED_AHEAD}
        return wanted <= found or None

    job.wait_for(f"programs compiled ahead: {sorted(wanted)}", has_all, timeout_s)


def find_programs_after(change: str, events: Iterable[Event], hosts: Iterable[str]) -> dict[str, list[int]]:
    """Return what each host had to do for programs in the generation of the first "shrink" or "grow".

    Returns:
        By host, how many programs its first step compiled and fetched, and how many slow ones the host has compiled.
    """
    events = list(events)
    formed = [e for e in events if e.kind is EventKind.WORLD_FORMED and e.detail["change"] == change]
    generation = min(event.generation or 0 for event in formed)
    of_generation = [event for event in events if event.generation == generation]
    found = {}
    for event in of_generation:
        if event.kind is EventKind.PROGRAMS_READY and event.host in hosts:
            found[event.host] = [int(event.detail["compiled"]), int(event.detail["fetched"]), 0]
    for event in of_generation:
        if event.kind is EventKind.COMPILE_CACHE_MISS and event.host in found:
            found[event.host][2] += 1
    return found


def start_joining_agent(
    job: PatientJob, folder: Path, host: str, command: Sequence[str], options: Sequence[str] = ()
) -> HandStartedAgent:
    """Start an agent with two devices that joins a running job; its run folder has none of the others' programs."""
    contact = read_contact(job.run_directory)
    words = ["--store", contact.store, "--job", contact.job, "--host-name", host, "--address", "127.0.0.99"]
    words += ["--num-hosts", "2", "--run-dir", str(folder)]
    words += ["--platform", "cpu", "--devices-per-host", "2", *options]
    return HandStartedAgent(
        [*words, "--", *command],
        folder.with_suffix(".out"),
        environment={TOKEN_VARIABLE: contact.token},
    )


def wait_joining(job: PatientJob, host: str, timeout_s: float) -> None:
    """Wait until the members are ordered to stop for this host at the end of their step."""
    job.wait_event(
        f"{host} joins after this step",
        lambda event: (
            event.kind is EventKind.GENERATION_PHASE
            and event.detail["phase"] == "boundary"
            and host in str(event.detail["reason"])
        ),
        timeout_s,
    )
