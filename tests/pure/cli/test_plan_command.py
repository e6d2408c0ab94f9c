"""`resilient-jax plan --check FILE` prints tables of a topology, or the file's error in one line."""

import sys

import pytest

from resilient_jax.cli import main
from resilient_jax.cli.topology_table import format_si
from resilient_jax.errors import ExitCode
from tests.support.paths import MESHES
from tests.support.topologies import TEXT


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*arguments):
        """Return exit code, standard output and standard error of the command."""
        monkeypatch.setattr(sys, "argv", ["resilient-jax", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main.main()
        return end.value.code, *capsys.readouterr()

    return run


def test_a_valid_file_is_printed_as_tables(run):
    code, shown, errors = run("--check", MESHES / "h100_2048x8.toml")
    assert (code, errors) == (ExitCode.DONE, "")
    rows = [" ".join(line.replace("│", " ").split()) for line in shown.splitlines()]
    assert rows[0].startswith("topology h100_2048x8: 2048 hosts, 16384 devices")
    for row in [
        "2048 8 NVIDIA H100 SXM 80GB 100 %",
        "bf16 989.4 TFLOP/s",
        "host 450 GB/s each device 1 : 1 3.4 µs",
        "cluster 50 GB/s each device 7 : 1 14 µs",
        "rack 1024 2",
        "pod 6 384 (in 5), 128 (in 1)",
    ]:
        assert row in rows
    assert "source of links within a cluster: arXiv 2407.21783" in shown


@pytest.mark.parametrize("path", sorted(MESHES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_topology_is_valid(run, path):
    code, shown, errors = run("--check", path)
    assert (code, errors) == (ExitCode.DONE, "")
    assert f"topology {path.stem}: " in shown
    assert "source of hosts: " in shown


def test_an_invalid_file_is_an_error_of_one_line_with_file_and_key(run, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace("latency_s = 1e-6", "latency_s = -1"), encoding="utf-8")
    assert run("--check", path) == (
        ExitCode.USAGE,
        "",
        f"resilient-jax: {path}: key 'links[0].latency_s': found -1 (int), expected a number >= 0.0. Change the "
        "value.\n",
    )


def test_strings_of_a_file_are_not_parsed_as_markup(run, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace('source = "made up"', 'source = "[1] data sheet"'), encoding="utf-8")
    code, shown, _ = run("--check", path)
    assert code == ExitCode.DONE
    assert "source of chip: [1] data sheet" in shown


def test_without_options_the_command_lists_the_required_ones(run):
    code, shown, errors = run()
    assert (code, shown) == (ExitCode.USAGE, "")
    assert errors == (
        "resilient-jax: plan: found nothing to do, expected --topology, --model and --global-batch, "
        "or --check FILE, such as "
        "--topology meshes/h100_32x8.toml --model configs/llama3_70b.toml --global-batch 1024\n"
    )


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (989.4e12, "989.4 TB"),
        (3.35e12, "3.35 TB"),
        (50e9, "50 GB"),
        (999, "999 B"),
        (1e15, "1 PB"),
        (0.5, "0.5 B"),
    ],
)
def test_values_are_formatted_with_si_prefixes(number, text):
    assert format_si(number, "B") == text
