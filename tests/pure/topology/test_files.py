"""The files in `meshes/`: each loads, its figures are plausible and have sources, and match the named cluster."""

import re

import pytest

import resilient_jax as rj
from resilient_jax.snapshot.parity_groups import describe_weaknesses, form_parity_groups
from resilient_jax.topology import NumberFormat, Topology, decode_topology
from resilient_jax.topology.file_format import TABLES
from tests.support.paths import MESHES

FILES = sorted(MESHES.glob("*.toml"))

SIZES = {
    "a100_128x4": (128, 512),
    "a100_32x8": (32, 256),
    "a800_16x8": (16, 128),
    "h100_1x8": (1, 8),
    "h100_8x8": (8, 64),
    "h100_2048x8": (2048, 16_384),
    "h100_32x8": (32, 256),
    "local_1x8": (1, 8),
    "local_4x2": (4, 8),
    "local_8x1": (8, 8),
    "tpu_v5p_32x4": (32, 128),
}

BANDWIDTH_BETWEEN_HOSTS = {  # bytes per second each way, of all devices of a host together
    "a100_128x4": 4 * 25e9,
    "a100_32x8": 25e9,
    "a800_16x8": 100e9,
    "h100_2048x8": 8 * 50e9,
    "h100_32x8": 8 * 50e9,
    "tpu_v5p_32x4": 4 * 600e9,
}

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def load(stem: str) -> Topology:
    return rj.planning.load_topology(MESHES / f"{stem}.toml")


def test_the_documented_topologies_exist():
    assert [path.stem for path in FILES] == sorted(SIZES)


@each_file
def test_a_file_describes_the_topology_of_its_name(path):
    topology = rj.planning.load_topology(path)
    assert topology.name == path.stem
    assert (len(topology.hosts), topology.device_count) == SIZES[path.stem]
    assert topology.description


@each_file
def test_the_figures_of_an_accelerator_are_plausible(path):
    for accelerator in rj.planning.load_topology(path).accelerators:
        peaks = {peak.number_format: peak.flops_per_s for peak in accelerator.peaks}
        fastest = max(peaks.values())
        if "local" in path.stem:
            assert 1e9 < fastest < 1e12
            assert 1e9 < accelerator.memory_bytes < 64e9
            assert 1e8 < accelerator.memory_bandwidth_bytes_per_s < 1e11
        else:
            assert 3e14 <= peaks[NumberFormat.BF16] <= fastest < 1e16
            assert 32e9 <= accelerator.memory_bytes <= 192e9
            # A device reads its whole memory 10 to 50 times in a second.
            assert 10 <= accelerator.memory_bandwidth_bytes_per_s / accelerator.memory_bytes <= 50
            # Every accelerator of these years does 100 to 1000 operations per byte that it reads.
            assert 100 <= peaks[NumberFormat.BF16] / accelerator.memory_bandwidth_bytes_per_s <= 1000


@each_file
def test_a_wider_level_has_no_more_bandwidth_and_no_less_latency(path):
    topology = rj.planning.load_topology(path)
    devices = topology.hosts[0].devices
    rates = [level.bandwidth_of_device(devices) for level in topology.levels]
    if "tpu" not in path.stem:  # a chip has more links out of its host than inside: see the file
        assert rates == sorted(rates, reverse=True)
    latencies = [level.latency_s for level in topology.levels]
    assert latencies == sorted(latencies)
    assert 1e-7 < latencies[0] <= latencies[-1] < 1e-3


@pytest.mark.parametrize("stem", BANDWIDTH_BETWEEN_HOSTS)
def test_hosts_have_the_bandwidth_of_the_clusters_adapters(stem):
    topology = load(stem)
    devices = topology.hosts[0].devices
    level = topology.level_between(topology.hosts[0].name, topology.hosts[1].name)
    assert level.bandwidth_of_device(devices) * devices == BANDWIDTH_BETWEEN_HOSTS[stem]


def test_the_largest_cluster_is_oversubscribed_between_pods():
    topology = load("h100_2048x8")
    assert topology.failure_levels == ("host", "rack", "pod")
    assert [len(pod.hosts) for pod in topology.domains("pod")] == [384, 384, 384, 384, 384, 128]
    assert topology.level_between("host-0000", "host-0383").bandwidth_of_device(8) == 50e9
    assert topology.level_between("host-0000", "host-0384").bandwidth_of_device(8) == 50e9 / 7


@each_file
def test_every_figure_has_its_source_beside_it(path):
    tables = re.split(r"^\[\[\w+\]\]$", path.read_text("utf-8"), flags=re.MULTILINE)[1:]
    assert [len(re.findall(r'^source = "[^"]{20,}"$', table, flags=re.MULTILINE)) for table in tables] == [
        1
    ] * len(tables)


@each_file
def test_the_source_of_a_latency_states_whether_it_was_measured_or_assumed(path):
    for level in rj.planning.load_topology(path).levels:
        assert re.search(r"assumed|measured", level.source), f"{path}: level {level.name}"


def test_an_accelerator_has_the_same_figures_in_every_file():
    clusters = [path for path in FILES if "local" not in path.stem]
    known = {kind for path in clusters for kind in rj.planning.load_topology(path).accelerators}
    assert len({kind.name for kind in known}) == len(known)


@each_file
def test_the_table_of_files_in_the_documentation_names_every_file(path):
    assert f"`{path.name}`" in (MESHES / "README.md").read_text("utf-8")


def test_the_documentation_s_example_file_is_valid():
    text = (MESHES / "README.md").read_text("utf-8")
    example = re.search(r"```toml\n(.*?)```", text, flags=re.DOTALL)
    assert example is not None
    topology = decode_topology(example[1], source="meshes/README.md")
    assert topology.device_count == 128
    assert topology.failure_levels == ("host", "rack")
    assert [len(rack.hosts) for rack in topology.domains("rack")] == [8, 8]


@pytest.mark.parametrize("readme", ["meshes/README.md", "resilient_jax/topology/README.md"])
def test_the_documentation_s_python_runs(readme, monkeypatch):
    monkeypatch.chdir(MESHES.parent)
    text = (MESHES.parent / readme).read_text("utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, readme, "exec"), {})


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.__name__)
def test_every_key_of_a_file_is_documented(table):
    text = (MESHES / "README.md").read_text("utf-8")
    keys = table.__struct_fields__
    assert [key for key in keys if not re.search(rf"`(\[\[)?{key}\b", text)] == []


def test_failure_domains_of_a_topology_keep_the_parity_of_snapshots_apart():
    topology = load("h100_32x8")
    racks = topology.domain_of("rack")
    groups = form_parity_groups([host.name for host in topology.hosts], 1, domain_of=racks)
    assert [len(group.hosts) for group in groups] == [8, 8, 8, 8]
    assert describe_weaknesses(groups, 1, racks) == ()
