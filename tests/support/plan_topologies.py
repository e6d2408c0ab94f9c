"""Small clusters and programs for tests of plans, as values and as hypothesis strategies."""

from hypothesis import strategies as st

from resilient_jax.ids import HostName
from resilient_jax.planning.calibration import Calibration
from resilient_jax.planning.program_cost import ProgramCost
from resilient_jax.planning.transformer import TransformerShape
from resilient_jax.planning.transformer_cost import analyze_transformer
from resilient_jax.topology import Accelerator, Host, LinkLevel, NumberFormat, Peak, Port, Topology

SMALL = TransformerShape(
    layers=3,
    width=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    feed_forward=96,
    vocabulary_tokens=128,
    sequence_tokens=32,
)
AMPLE_BYTES = 10**9


def small_profile(**changes) -> ProgramCost:
    """Return the cost of a transformer of three layers; `changes` are other sizes."""
    sizes = {name: getattr(SMALL, name) for name in SMALL.__struct_fields__} | changes
    return analyze_transformer(TransformerShape(**sizes), name="small")


def chip(memory_bytes: int = AMPLE_BYTES, flops_per_s: float = 1e10) -> Accelerator:
    """Return an accelerator slow enough that a small program takes measurable time."""
    return Accelerator(
        name=f"chip of {memory_bytes} bytes, {flops_per_s:g} FLOP/s",
        peaks=(Peak(number_format=NumberFormat.BF16, flops_per_s=flops_per_s),),
        memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=1e10,
    )


def cluster(
    speeds,
    *,
    devices: int | list[int] = 2,
    memory_bytes=AMPLE_BYTES,
    inner=1e9,
    network=1e8,
    latency_s=1e-5,
    per_rack=0,
    oversubscription=1.0,
) -> Topology:
    """Return a cluster with a host for each speed, in racks if given; `devices` is of all hosts or of each."""
    each = devices if isinstance(devices, list) else [devices] * len(speeds)
    levels = [LinkLevel(name="host", bandwidth_bytes_per_s=inner, port=Port.DEVICE, latency_s=1e-6)]
    if per_rack:
        levels.append(
            LinkLevel(name="rack", bandwidth_bytes_per_s=network, port=Port.DEVICE, latency_s=latency_s)
        )
    levels.append(
        LinkLevel(
            name="cluster",
            bandwidth_bytes_per_s=network,
            port=Port.DEVICE,
            latency_s=latency_s,
            oversubscription=oversubscription,
        )
    )
    accelerator = chip(memory_bytes)
    hosts = tuple(
        Host(
            name=HostName(f"host-{i:02}"),
            accelerator=accelerator,
            devices=number,
            speed=speed,
            domains=(f"rack-{i // per_rack}",) if per_rack else (),
        )
        for i, (speed, number) in enumerate(zip(speeds, each, strict=True))
    )
    return Topology(name="made up", levels=tuple(levels), hosts=hosts)


def tight_bytes(profile: ProgramCost, share: float) -> int:
    """Return the memory of a device with room for this fraction of the program's state and the snapshot's buffers."""
    constants, gradients = Calibration(), profile.parameter_count * profile.gradient_bytes
    state = profile.parameter_bytes + profile.optimizer_bytes + gradients
    return int((constants.staging_bytes + share * state) / constants.usable_memory)


@st.composite
def tight_clusters(draw, profile, most_hosts=4, speeds=(1.0, 1.0, 0.6, 0.3)) -> Topology:
    """Draw a cluster in which memory decides how a pipeline's layers are split, and often no plan fits."""
    return cluster(
        draw(st.lists(st.sampled_from(speeds), min_size=2, max_size=most_hosts)),
        devices=draw(st.sampled_from([1, 1, 2])),
        memory_bytes=tight_bytes(profile, draw(st.floats(0.2, 0.9))),
        network=draw(st.sampled_from([1e7, 1e9])),
        latency_s=0.0,
        per_rack=draw(st.sampled_from([0, 2])),
    )


@st.composite
def clusters(draw, most_hosts=4) -> Topology:
    """Draw any small cluster: slow hosts, hosts that lost devices, racks, little memory."""
    hosts = draw(st.integers(1, most_hosts))
    return cluster(
        draw(st.lists(st.sampled_from([1.0, 1.0, 1.0, 0.6, 0.3]), min_size=hosts, max_size=hosts)),
        devices=draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=hosts, max_size=hosts)),
        memory_bytes=draw(st.sampled_from([AMPLE_BYTES, 75_500_000, 74_600_000, 74_000_000])),
        inner=draw(st.sampled_from([1e8, 1e9])),
        network=draw(st.sampled_from([1e7, 1e8])),
        latency_s=draw(st.sampled_from([0.0, 1e-5, 1e-3])),
        per_rack=draw(st.sampled_from([0, 2])),
        oversubscription=draw(st.sampled_from([1.0, 4.0])),
    )
