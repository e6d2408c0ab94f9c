"""Invalid topology files: the message names file and key, what was found, what was expected, what to do."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.errors import ConfigError
from resilient_jax.topology import Topology, decode_topology, load_topology
from tests.support.topologies import TEXT


def edited(old: str, new: str) -> str:
    """Return the small topology with the first `old` replaced by `new`."""
    assert old in TEXT
    return TEXT.replace(old, new, 1)


def without_tables(name: str) -> str:
    """Return the small topology without its `[[name]]` tables."""
    return re.sub(rf"\[\[{name}\]\]\n(?:.+\n)+", "", TEXT)


REFUSALS = {
    "no links": (
        without_tables("links"),
        "key 'links': found no links, expected [[links]] tables from inside outward, the first with level = 'host'. "
        "Say how fast devices and hosts are connected.",
    ),
    "no hosts": (
        without_tables("hosts"),
        "key 'hosts': found no hosts, expected [[hosts]] tables. Add one with names, accelerator and "
        "devices_per_host.",
    ),
    "no accelerators": (
        without_tables("accelerators"),
        "key 'hosts[0].accelerator': found the unknown accelerator 'chip', expected one of [], the names of "
        "[[accelerators]]. Correct the name, or remove it.",
    ),
    "unknown accelerator": (
        edited('accelerator = "chip"', 'accelerator = "chop"'),
        "key 'hosts[0].accelerator': found the unknown accelerator 'chop', expected one of ['chip'], the names of "
        "[[accelerators]]. Did you mean 'chip'?",
    ),
    "accelerator twice": (
        TEXT + TEXT[TEXT.index("[[accelerators]]") : TEXT.index("[[hosts]]")],
        "key 'accelerators[1].name': found 'chip' a second time, expected every name once. Rename it.",
    ),
    "negative peak": (
        edited("bf16 = 1e14", "bf16 = -1e14"),
        "key 'accelerators[0].peak_flops_per_s.bf16': found -100000000000000.0 (float), expected a number >= "
        "1000000.0. Change the value.",
    ),
    "unknown number format": (
        edited("bf16", "bf61"),
        "key 'accelerators[0].peak_flops_per_s.bf61': found an unknown key, expected one of fp64, fp32, tf32, bf16, "
        "fp16, fp8, int8. Did you mean 'bf16'?",
    ),
    "no number format": (
        edited("peak_flops_per_s.bf16 = 1e14", "peak_flops_per_s = {}"),
        "key 'accelerators[0].peak_flops_per_s': found no number format, expected at least one of fp64, fp32, tf32, "
        "bf16, fp16, fp8, int8. Add one, such as peak_flops_per_s.bf16 = 1e14.",
    ),
    "negative memory": (
        edited("memory_bytes = 16e9", "memory_bytes = -16e9"),
        "key 'accelerators[0].memory_bytes': found -16000000000.0 (float), expected a number >= 1000000.0. Change "
        "the value.",
    ),
    "memory in gigabytes": (
        edited("memory_bytes = 16e9", "memory_bytes = 16"),
        "key 'accelerators[0].memory_bytes': found 16 (int), expected a number >= 1000000.0. Change the value.",
    ),
    "a unit that is not ours": (
        edited("memory_bytes = 16e9", "memory_gib = 16"),
        "key 'accelerators[0].memory_gib': found an unknown key, expected one of name, peak_flops_per_s, "
        "memory_bytes, memory_bandwidth_bytes_per_s, source. Did you mean 'memory_bytes'?",
    ),
    "negative bandwidth": (
        edited("device_bandwidth_bytes_per_s = 1e11", "device_bandwidth_bytes_per_s = -1e11"),
        "key 'links[0].device_bandwidth_bytes_per_s': found -100000000000.0 (float), expected a number >= 1000.0. "
        "Change the value.",
    ),
    "infinite bandwidth": (
        edited("device_bandwidth_bytes_per_s = 1e11", "device_bandwidth_bytes_per_s = inf"),
        "key 'links[0].device_bandwidth_bytes_per_s': found inf (float), expected a number <= 1e+16. Change the "
        "value.",
    ),
    "no bandwidth": (
        edited("device_bandwidth_bytes_per_s = 1e11\n", ""),
        "key 'links[0]': found neither of device_bandwidth_bytes_per_s and host_bandwidth_bytes_per_s, expected one "
        "of them. Give the device's if each device has a port of its own, the host's if its devices share it.",
    ),
    "two bandwidths": (
        edited(
            "device_bandwidth_bytes_per_s = 1e11",
            "device_bandwidth_bytes_per_s = 1e11\nhost_bandwidth_bytes_per_s = 1e11",
        ),
        "key 'links[0]': found both of device_bandwidth_bytes_per_s and host_bandwidth_bytes_per_s, expected one of "
        "them. Give the device's if each device has a port of its own, the host's if its devices share it.",
    ),
    "negative latency": (
        edited("latency_s = 1e-6", "latency_s = -1e-6"),
        "key 'links[0].latency_s': found -1e-06 (float), expected a number >= 0.0. Change the value.",
    ),
    "latency in microseconds": (
        edited("latency_s = 1e-5", "latency_s = 10"),
        "key 'links[1].latency_s': found 10 (int), expected a number <= 1.0. Change the value.",
    ),
    "no latency": (
        edited("latency_s = 1e-6\n", ""),
        "key 'links[0].latency_s': found nothing, expected this key. Add it; meshes/README.md says what it means.",
    ),
    "no source": (
        edited('source = "made up"\n', ""),
        "key 'accelerators[0].source': found nothing, expected this key. Add it; meshes/README.md says what it "
        "means.",
    ),
    "oversubscription below one": (
        edited("oversubscription = 4", "oversubscription = 0.25"),
        "key 'links[3].oversubscription': found 0.25 (float), expected a number >= 1.0. Change the value.",
    ),
    "first level not the host's": (
        edited('level = "host"', 'level = "node"'),
        "key 'links[0].level': found 'node' as the first level, expected 'host'. List levels from inside outward, "
        "starting with the links between the devices of a host.",
    ),
    "level twice": (
        edited('level = "pod"', 'level = "rack"'),
        "key 'links[2].level': found the level 'rack' a second time, expected every level once. Rename it.",
    ),
    "domains of the outermost level": (
        edited("oversubscription = 4", "hosts_per_domain = 8"),
        "key 'links[3].hosts_per_domain': found 8, expected none: the last level has all hosts. Remove it, or add "
        "the level that is missing.",
    ),
    "domains of the innermost level": (
        edited('level = "host"', 'level = "host"\nhosts_per_domain = 2'),
        "key 'links[0].hosts_per_domain': found 2, expected none: a host is its own domain. Remove it, or add the "
        "level that is missing.",
    ),
    "domains that do not nest": (
        edited("hosts_per_domain = 4", "hosts_per_domain = 3"),
        "key 'links[2].hosts_per_domain': found 3, expected a multiple of the 2 hosts of the domains inside. Change "
        "one of them, or name each host's domains in [[hosts]].",
    ),
    "no domains": (
        edited("hosts_per_domain = 2\n", ""),
        "key 'hosts[0].domains.rack': found nothing, expected the name of these hosts' rack. Add it, or give the "
        "level 'rack' hosts_per_domain to have the hosts counted off.",
    ),
    "domain of no level": (
        edited("devices_per_host = 4", 'devices_per_host = 4\ndomains.row = "A"'),
        "key 'hosts[0].domains.row': found a domain of the level 'row', expected one of []: the levels between the "
        "first and the last that have no hosts_per_domain. Remove it, or that level's hosts_per_domain.",
    ),
    "domain that is no name": (
        edited("devices_per_host = 4", "devices_per_host = 4\ndomains.rack = 3"),
        "key 'hosts[0].domains': found {'rack': 3} (dict), expected a string for each of its keys. Change the value.",
    ),
    "links inside a host only": (
        TEXT[: TEXT.index('[[links]]\nlevel = "rack"')],
        "key 'links': topology 'small': found links inside a host only, for 8 hosts, expected also a level that "
        "connects the hosts. Add one after the level 'host'.",
    ),
    "host twice": (
        edited('"host-{0..7}"', '["host-{0..6}", "host-3"]'),
        "key 'hosts': host 'host-3': found it twice, expected every host once. Rename or leave out one of them.",
    ),
    "range that runs backwards": (
        edited("{0..7}", "{7..0}"),
        "key 'hosts[0].names': found 'host-{7..0}' with a range that runs backwards, expected the smaller number "
        "first. Write {0..7}.",
    ),
    "brace without a range": (
        edited("{0..7}", "{0-7}"),
        "key 'hosts[0].names': found 'host-{0-7}' with a brace that belongs to no range, expected ranges like "
        "{00..31}. Correct the pattern, or list the names.",
    ),
    "more hosts than there are": (
        edited("{0..7}", "{0..9999}{0..9999}"),
        "key 'hosts[0].names': found 'host-{0..9999}{0..9999}', which is 100000000 hosts, expected at most 1000000. "
        "Correct its ranges.",
    ),
    "names of another type": (
        edited('"host-{0..7}"', "8"),
        "key 'hosts[0].names': found 8 (int), expected a string or an array of strings. Change the value.",
    ),
    "no devices": (
        edited("devices_per_host = 4", "devices_per_host = 0"),
        "key 'hosts[0].devices_per_host': found 0 (int), expected an integer >= 1. Change the value.",
    ),
    "half a device": (
        edited("devices_per_host = 4", "devices_per_host = 4.5"),
        "key 'hosts[0].devices_per_host': found 4.5 (float), expected an integer. Change the value.",
    ),
    "speed above healthy": (
        edited("devices_per_host = 4", "devices_per_host = 4\nspeed = 1.5"),
        "key 'hosts[0].speed': found 1.5 (float), expected a number <= 1.0. Change the value.",
    ),
    "a table that we do not know": (
        TEXT + "\n[[switches]]\nname = 'x'\n",
        "key 'switches': found an unknown key, expected one of name, description, accelerators, hosts, links. "
        "Correct the name, or remove it.",
    ),
    "one table where a list of them is meant": (
        "name = 'x'\n[links]\nlevel = 'host'\n",
        "key 'links': found {'level': 'host'} (dict), expected an array. Change the value.",
    ),
    "not TOML": (
        "name = ",
        "found text that is not TOML (Invalid value (at end of document)), expected TOML 1.0. Correct it at that "
        "place.",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_names_file_key_found_expected_and_remedy(case):
    text, message = REFUSALS[case]
    with pytest.raises(ConfigError) as refusal:
        decode_topology(text, source="mine.toml")
    assert str(refusal.value) == f"mine.toml: {message}"


def test_a_rack_in_two_pods_is_refused_with_the_key():
    text = edited("hosts_per_domain = 2\n", "").replace("hosts_per_domain = 4\n", "")
    tables = [
        f'[[hosts]]\nnames = "{name}"\naccelerator = "chip"\ndevices_per_host = 1\nsource = "x"\n'
        f'domains.rack = "A"\ndomains.pod = "{pod}"\n'
        for name, pod in [("a", "north"), ("b", "south")]
    ]
    text = re.sub(r"\[\[hosts\]\]\n(?:.+\n)+", lambda _: "\n".join(tables), text)
    with pytest.raises(
        ConfigError, match=r"^mine\.toml: key 'hosts': rack 'A': found it in pod 'north' and, with host"
    ):
        decode_topology(text, source="mine.toml")


def test_the_error_of_a_missing_file_names_the_working_directory(tmp_path):
    path = tmp_path / "mine.toml"
    with pytest.raises(ConfigError) as refusal:
        load_topology(path)
    assert str(refusal.value) == (
        f"{path}: found no such file, expected a topology file. Check the path; it was looked for from {Path.cwd()}."
    )


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\), expected a topology file"):
        load_topology(tmp_path)


def test_a_file_that_is_not_text_is_refused_with_the_offset(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8 at offset 8"):
        load_topology(path)


lines = TEXT.splitlines()


@given(
    place=st.integers(0, len(lines) - 1),
    value=st.sampled_from(["-1", "0", "1e400", "nan", '""', "[]", "{}", "true", "[{}]", '"x"', "1979-05-27"]),
)
def test_any_single_value_results_in_a_topology_or_a_refusal_with_the_file(place, value):
    key, equals, _ = lines[place].partition("=")
    text = "\n".join([*lines[:place], f"{key}{equals} {value}" if equals else "", *lines[place + 1 :]])
    try:
        outcome = decode_topology(text, source="mine.toml")
    except ConfigError as refusal:
        outcome = refusal
    assert isinstance(outcome, Topology) or re.match(r"mine\.toml: (key '.+': )?found ", str(outcome))


@pytest.mark.parametrize("text", ["a = " + "1" * 5000, "a = " + "[" * 3000])
def test_absurd_nesting_and_numbers_are_refused(text):
    with pytest.raises(ConfigError, match=r"^mine\.toml: found text that is not TOML"):
        decode_topology(text, source="mine.toml")
