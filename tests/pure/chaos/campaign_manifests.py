"""Hypothesis strategies of chaos manifests."""

import string
from typing import Literal

from hypothesis import strategies as st

from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from tests.chaos import faults
from tests.chaos.manifest import (
    CampaignManifest,
    ChaosJob,
    ExpectedExit,
    FaultTarget,
    Incident,
    TargetPart,
    Trigger,
)

SECONDS = st.floats(0.1, 1000, allow_nan=False)
HOSTS = ("host-0", "host-1", "leader", "follower", "all")
MEMBERS = ("member-0", "member-2", "leader", "follower", "all")
STORES = {"embedded": TargetPart.STORE, "etcd": TargetPart.STORE_MEMBER}
"""The kinds of stores, each with its part that faults hit."""
TEXT = st.text(string.printable + "äé\x7f", max_size=20)

OUTER = st.one_of(
    st.just(faults.ProcessKill()),
    st.builds(
        faults.ProcessStop,
        duration_s=st.none() | SECONDS,
        until_event=st.none() | st.just(str(EventKind.HOST_LOST)),
    ),
    st.builds(faults.SlowProcess, share=st.floats(0.01, 0.99), duration_s=SECONDS),
    st.builds(faults.Notice, signal=st.sampled_from(["TERM", "USR1"]), times=st.integers(1, 10)),
    st.builds(faults.Flood, connections=st.integers(1, 9), duration_s=SECONDS),
    st.builds(faults.FullMemory, duration_s=SECONDS),
    st.builds(faults.NoDescriptors, duration_s=SECONDS),
    st.builds(faults.ClockJump, jump_s=st.floats(-1000, 1000), duration_s=SECONDS),
    st.builds(
        faults.BitFlip,
        region=st.sampled_from(["part", "parity", "mark", "manifest"]),
        count=st.integers(1, 9),
    ),
)
LINKS = st.one_of(
    st.builds(faults.NetworkPartition, duration_s=SECONDS),
    st.builds(faults.SlowLink, mbit_per_s=st.floats(0.1, 1000), duration_s=SECONDS),
    st.builds(faults.LossyLink, percent=st.floats(0.1, 100), duration_s=SECONDS),
)
AROUND = st.builds(faults.StuckOutput, duration_s=SECONDS) | st.just(faults.ScriptEdit())
INNER = st.one_of(
    st.builds(faults.ProcessExit, code=st.integers(0, 255)),
    st.just(faults.UserException()),
    st.builds(faults.MainThreadHang, duration_s=SECONDS),
    st.builds(faults.SlowInput, delay_s=SECONDS, duration_s=SECONDS),
    st.just(faults.NanGradients()),
    st.builds(faults.SilentCorruption, is_repeated=st.booleans()),
)
EVENTS = st.sampled_from([str(kind) for kind in EventKind])


@st.composite
def incidents(draw: st.DrawFn, store: Literal["embedded", "etcd"]) -> Incident:
    """Draw an incident that is valid for a job of two or more hosts in namespaces, with this store."""
    kind = draw(st.sampled_from(["outer", "link", "pair", "launcher", "inner", "sent"]))
    places = [one for one in FailPoint if one is not FailPoint.ON_DEVICE]
    place = draw(st.sampled_from(places)) if kind == "inner" or draw(st.booleans()) else None
    match kind:
        case "link":
            part, fault = TargetPart.LINK, draw(LINKS)
        case "pair":
            part, fault = TargetPart.LINK, draw(st.builds(faults.PairPartition, duration_s=SECONDS))
        case "launcher":
            part, fault = TargetPart.LAUNCHER, draw(AROUND)
        case "inner":
            part, fault = TargetPart.WORKER, draw(INNER)
            if isinstance(fault, faults.SlowInput):
                place = FailPoint.BEFORE_INPUT
            elif draw(st.booleans()):
                fault = draw(
                    st.builds(faults.SlowDevice, device=st.just(0), factor=st.just(2.0), duration_s=SECONDS)
                )
                place = FailPoint.ON_DEVICE
        case "sent":
            part, fault, place = TargetPart.SNAPSHOTS, faults.BitFlip(region="message"), FailPoint.BEFORE_SEND
        case _:
            others = {TargetPart.LINK, TargetPart.LAUNCHER, *STORES.values()} - {STORES[store]}
            part = draw(st.sampled_from([part for part in TargetPart if part not in others]))
            fault = draw(OUTER)
            if part is TargetPart.HOST and draw(st.booleans()):
                fault = draw(st.builds(faults.DeviceLoss, device=st.just(0), duration_s=SECONDS))
    if part is TargetPart.ZYGOTE:
        fault = faults.ProcessKill()
    if part is TargetPart.STORE_MEMBER and not isinstance(fault, faults.STORE_MEMBER_FAULTS):
        fault = faults.ProcessKill()
    names = MEMBERS if part is TargetPart.STORE_MEMBER else HOSTS
    fewest, most = (2, 2) if kind == "pair" else (1, 3)
    hosts = tuple(draw(st.lists(st.sampled_from(names), min_size=fewest, max_size=most, unique=True)))
    return Incident(
        trigger=Trigger(
            after_steps=draw(st.integers(0, 1000)),
            after_s=draw(st.none() | SECONDS),
            event=draw(st.none() | EVENTS),
            failpoint=place,
            host="host-1" if part is TargetPart.STORE_MEMBER else None,
        ),
        target=FaultTarget(part=part, hosts=hosts),
        fault=fault,
        overlaps=draw(st.booleans()),
        required_events=tuple(draw(st.lists(EVENTS, max_size=2))),
        forbidden_events=tuple(draw(st.lists(EVENTS, max_size=2))),
    )


@st.composite
def manifests(draw: st.DrawFn) -> CampaignManifest:
    """Draw a valid manifest."""
    store: Literal["embedded", "etcd"] = draw(st.sampled_from(["embedded", "etcd"]))
    return CampaignManifest(
        seed=draw(st.integers(0, 1000)),
        about=draw(TEXT),
        script=tuple(draw(st.lists(TEXT, max_size=3))),
        recovery_timeout_s=draw(SECONDS),
        job=ChaosJob(
            hosts=draw(st.integers(2, 8)),
            steps=draw(st.integers(0, 1000)),
            store=store,
            network="namespaces",
            disk_mib=draw(st.integers(0, 100)),
            may_set_clock=True,
            config=draw(
                st.fixed_dictionaries(
                    {}, optional={"lease_ttl_s": SECONDS, "state_loss_policy": st.just("stop")}
                )
            ),
        ),
        expected_exit=ExpectedExit(code=draw(st.integers(0, 255))),
        incidents=tuple(draw(st.lists(incidents(store), max_size=5))),
    )
