"""`--topology FILE` gives each host its failure domain, over which parity groups are spread."""

import sys

import pytest

from resilient_jax.cli import main
from resilient_jax.cli.options import read_failure_domain
from resilient_jax.errors import CallerError, ConfigError, ExitCode
from resilient_jax.ids import HostName
from resilient_jax.snapshot.parity_groups import form_parity_groups
from resilient_jax.topology import load_topology
from tests.support.paths import MESHES


def test_the_failure_domain_of_a_host_is_its_rack_in_its_pod():
    assert read_failure_domain(MESHES / "h100_2048x8.toml", "host-0000") == "pod-0/rack-0"
    assert read_failure_domain(MESHES / "local_4x2.toml", "host-2") == ""


@pytest.mark.parametrize(("file", "parity"), [("h100_32x8.toml", 2), ("h100_2048x8.toml", 1)])
def test_no_rack_of_a_topology_has_more_shards_of_a_stripe_than_parity(file, parity):
    topology = load_topology(MESHES / file)
    hosts = [HostName(host.name) for host in topology.hosts]
    paths = {
        host: "/".join(domain.name for domain in reversed(topology.failure_domains(host)[1:]))
        for host in hosts
    }
    for group in form_parity_groups(hosts, parity, domain_of=paths):
        racks = [paths[host] for host in group.hosts]
        assert max(map(racks.count, racks)) <= parity


def test_a_parity_group_is_spread_evenly_over_wider_domains():
    # Four pods of two racks of two hosts: a group of four has a host of each pod, not only of each rack.
    hosts = [HostName(f"h{number:02}") for number in range(16)]
    paths = {host: f"pod-{number // 4}/rack-{number // 2}" for number, host in enumerate(hosts)}
    for group in form_parity_groups(hosts, 1, group_size=4, domain_of=paths):
        pods = [paths[host].partition("/")[0] for host in group.hosts]
        assert max(map(pods.count, pods)) == 1


def test_a_host_missing_from_the_topology_is_refused_with_the_file_and_similar_names():
    with pytest.raises(CallerError, match=r"--topology .*local_4x2\.toml: .*host-9.*host-"):
        read_failure_domain(MESHES / "local_4x2.toml", "host-9")


def test_a_file_that_is_no_topology_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("name = 3\n")
    with pytest.raises((CallerError, ConfigError), match=r"mine\.toml"):
        read_failure_domain(file, "host-0")


def test_launch_refuses_a_topology_with_too_few_hosts_before_it_starts_a_process(
    monkeypatch, capsys, tmp_path
):
    script = tmp_path / "script.py"
    script.write_text("")
    topology = str(MESHES / "local_4x2.toml")
    arguments = [
        "launch",
        "--hosts",
        "5",
        "--topology",
        topology,
        "--run-dir",
        str(tmp_path / "run"),
        str(script),
    ]
    monkeypatch.setattr(sys, "argv", ["resilient-jax", *arguments])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == ExitCode.USAGE
    assert "host-4" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
