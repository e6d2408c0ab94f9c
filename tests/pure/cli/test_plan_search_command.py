"""`resilient-jax plan --topology --model --global-batch` prints plans, terms, a chart and the replan; or JSON."""

import json
import sys

import pytest

from resilient_jax.cli import main
from resilient_jax.cli.plan_table import draw_bars
from resilient_jax.errors import ExitCode
from tests.support.paths import CONFIGS, MESHES

ASKED = (
    "--topology",
    str(MESHES / "h100_1x8.toml"),
    "--model",
    str(CONFIGS / "llama3_8b.toml"),
    "--global-batch",
    "64",
)
CHANGED = (
    "--topology",
    str(MESHES / "h100_32x8.toml"),
    "--model",
    str(CONFIGS / "llama3_8b.toml"),
    "--global-batch",
    "1024",
    "--without",
    "host-07",
    "--slow",
    "host-11=0.6",
)


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*arguments):
        """Return exit code, standard output and standard error of the command."""
        monkeypatch.setattr(sys, "argv", ["resilient-jax", "plan", *arguments])
        with pytest.raises(SystemExit) as end:
            main.main()
        return end.value.code, *capsys.readouterr()

    return run


def test_plans_are_printed_with_their_time_memory_and_reason(run):
    code, shown, errors = run(*ASKED)
    assert (code, errors) == (ExitCode.DONE, "")
    for text in (
        "Llama 3 8B on h100_1x8: 8 devices",
        "fsdp 8",
        "tokens/s",
        "MFU",
        "seconds of a step by term",
    ):
        assert text in shown
    assert "memory of the fullest device by term" in shown
    assert "  compute ██████" in shown
    assert "why: fsdp 8: the fastest of all plans; next best is" in shown


def test_a_change_is_printed_with_the_moved_bytes_and_the_decision(run):
    code, shown, _ = run(*CHANGED)
    assert code == ExitCode.DONE
    assert "248 devices" in shown
    assert "bytes moved" in shown
    assert "what to do: " in shown
    assert "to the next failure" in shown or "before the next failure" in shown


def test_json_has_plans_terms_and_moves_that_sum_to_their_totals(run):
    code, shown, _ = run(*CHANGED, "--json", "--top", "4")
    found = json.loads(shown)
    assert code == ExitCode.DONE
    assert len(found["plans"]) == 4
    best = found["plans"][0]
    assert sum(best["step_s"].values()) == pytest.approx(best["step_time_s"])
    assert sum(best["memory_by_term_bytes"].values()) == pytest.approx(best["memory_bytes"])
    assert best["memory_bytes"] <= best["usable_bytes"]
    first = found["change"]["steps"][0]["options"][0]["plan"]
    assert first["bytes_moved"] > 0
    assert sum(move["bytes_moved"] for move in first["moves"]) == pytest.approx(first["bytes_moved"])


DECIDED = (
    "--topology",
    str(MESHES / "h100_8x8.toml"),
    "--model",
    str(CONFIGS / "llama3_8b.toml"),
    "--global-batch",
    "512",
    "--decide",
)


def test_what_would_be_done_after_each_possible_loss_is_printed(run):
    code, shown, errors = run(*DECIDED, "--min-replicas", "4")
    assert (code, errors) == (ExitCode.DONE, "")
    for loss in (
        "a device: host-7/7",
        "a host: host-7",
        "two hosts: host-3 and host-7",
        "a rack: host-4 to host-7",
    ):
        assert loss in shown
    assert "when host-7 is back with 4 devices" in shown
    assert "a host: host-7: the job goes on in place: 0.79 of full speed after 0.9 s" in shown


def test_each_possible_loss_has_its_options_as_json_the_choice_first(run):
    code, shown, _ = run(*DECIDED, "--min-replicas", "4", "--json")
    losses = json.loads(shown)["losses"]
    assert code == ExitCode.DONE
    assert [loss["kind"] for loss in losses] == ["a device", "a host", "two hosts", "a rack"]
    assert [loss["num_alike"] for loss in losses] == [64, 8, 28, 2]
    for loss in losses:
        options = loss["steps"][0]["options"]
        assert {option["action"] for option in options} > {
            "shrink",
            "keep_axes",
            "keep_stages",
            "wait",
            "stop",
        }
        assert next(option["action"] for option in options if not option["why_not"]) == "shrink"
        assert all(option["why_not"] or option["speed"] > 0 for option in options)
    speeds = [loss["steps"][-1]["options"][0]["speed"] for loss in losses]
    assert speeds == sorted(speeds, reverse=True), "the more is lost, the less is kept"


def test_a_loss_after_which_no_plan_fits_has_the_reason(run):
    code, shown, _ = run(*DECIDED, "--min-replicas", "32", "--json")
    losses = {loss["kind"]: loss for loss in json.loads(shown)["losses"]}
    assert code == ExitCode.DONE
    assert losses["a rack"]["steps"] == []
    assert "found no plan for the 32 devices" in losses["a rack"]["why_stop"]
    _, table, _ = run(*DECIDED, "--min-replicas", "32")
    assert "stop" in table


def test_what_the_leader_would_do_about_a_slow_host_or_device_is_printed(run):
    code, shown, _ = run(*DECIDED)
    assert code == ExitCode.DONE
    assert "a host or a device slow: the speed after each action" in shown
    for slow in ("a host at 0.5: host-7", "a device at 0.25: host-7/7"):
        assert slow in shown


def test_each_slow_host_has_its_options_as_json_the_choice_first(run):
    code, shown, _ = run(*DECIDED, "--json")
    found = json.loads(shown)["slow"]
    assert code == ExitCode.DONE
    assert [(*one["names"], one["speed"]) for one in found] == [
        (name, speed) for name in ("host-7", "host-7/7") for speed in (0.8, 0.5, 0.25)
    ]
    assert [one["num_alike"] for one in found] == [8] * 3 + [64] * 3
    for one in found:
        options = {option["action"]: option for option in one["steps"][0]["options"]}
        assert set(options) == {"keep", "replace", "take_out", "fewer_devices", "redivide"}
        kept = options["keep"]["speed"]
        assert one["speed"] - 0.01 <= kept < 1, "all wait for the slowest, at most"
        assert options["replace"]["why_not"] == "no spare is ready"
    first = [one["steps"][0]["options"][0]["action"] for one in found]
    assert first[0] == first[3] == "keep"
    assert first[5] == "fewer_devices"
    assert found[2]["steps"][0]["options"][0]["action"] == "take_out", (
        "no device of it is slower than the others"
    )


def test_a_spare_and_what_is_left_of_a_host_count_for_what_is_done_about_a_slow_one(run):
    _, shown, _ = run(*DECIDED, "--json", "--spare")
    assert [one["steps"][0]["options"][0]["action"] for one in json.loads(shown)["slow"]] == ["replace"] * 6
    _, shown, _ = run(*DECIDED, "--json", "--devices-after-loss", "host")
    slowest = json.loads(shown)["slow"][5]
    options = {option["action"]: option["why_not"] for option in slowest["steps"][0]["options"]}
    assert options["fewer_devices"] == 'devices_after_loss = "host": it cannot do without a device'


def test_an_axis_that_is_given_leaves_nothing_to_decide(run):
    code, _, errors = run(*DECIDED, "--axis", "tensor=8")
    assert code == ExitCode.USAGE
    assert "--decide: found --axis beside it" in errors


def test_axes_can_be_constrained(run):
    code, shown, _ = run(*ASKED, "--axis", "tensor=4", "--json")
    assert code == ExitCode.DONE
    assert {plan["axes"]["tensor"] for plan in json.loads(shown)["plans"]} == {4}


def test_a_minimum_number_of_replicas_can_be_required(run):
    code, shown, _ = run(*CHANGED, "--min-replicas", "60", "--json")
    found = json.loads(shown)
    assert code == ExitCode.DONE
    assert {plan["axes"]["replica"] >= 60 for plan in found["plans"]} == {True}
    assert "of all plans with 60 replicas or more" in found["plans"][0]["reason"]


def test_a_calibration_beside_the_topology_is_used(run, tmp_path):
    (tmp_path / "mine.toml").write_text((MESHES / "h100_1x8.toml").read_text("utf-8"), "utf-8")
    asked = ("--topology", str(tmp_path / "mine.toml"), *ASKED[2:], "--json")
    fast = json.loads(run(*asked)[1])["plans"][0]["step_time_s"]
    (tmp_path / "mine.calibration.toml").write_text("matrix_efficiency = 0.25\n", "utf-8")
    assert json.loads(run(*asked)[1])["plans"][0]["step_time_s"] > 2 * fast


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (ASKED[:4], "plan: found nothing to do, expected --topology, --model and --global-batch, or --check"),
        ((*ASKED, "--without", "host-77"), "host 'host-77': found no such host in topology 'h100_1x8'"),
        ((*ASKED, "--slow", "host-0"), "--slow: found 'host-0', expected HOST=SPEED"),
        ((*ASKED, "--slow", "host-0=fast"), "--slow: found 'host-0=fast', expected a number"),
        ((*ASKED, "--axis", "tensor=three"), "--axis: found 'tensor=three', expected AXIS=SIZE"),
        ((*ASKED, "--axis", "tensor=3"), "axis tensor: found 3"),
        (
            (*ASKED, "--axis", "tensor=2", "--axis", "tensor=4"),
            "--axis: found 'tensor' twice, expected it once",
        ),
        (
            (*ASKED, "--slow", "host-0=0.5", "--slow", "host-0=0.6"),
            "--slow: found 'host-0' twice, expected it once",
        ),
        ((*ASKED, "--min-replicas", "9"), "min_replicas: found 9, expected at most 8"),
        (
            (*ASKED, "--min-replicas", "8"),
            "with at least 8 replicas. What would suffice: requesting ",
        ),
        ((*ASKED[:5], "0"), "global_batch: found 0, expected 1 or more"),
        ((*ASKED[:5], str(10**23)), f"--global-batch: found {10**23}, expected at most 1000000000"),
        ((*ASKED[:3], str(CONFIGS / "llama3_70b.toml"), *ASKED[4:]), "What would suffice: devices of"),
    ],
)
def test_bad_input_is_an_error_of_one_line(run, arguments, message):
    code, shown, errors = run(*arguments)
    assert (code, shown) == (ExitCode.USAGE, "")
    assert message in errors
    assert errors.count("\n") == 1


def test_help_contains_an_example(run):
    code, shown, _ = run("--help")
    assert code == 0
    assert "resilient-jax plan --topology meshes/h100_32x8.toml" in " ".join(shown.split())


def test_the_lengths_of_bars_are_proportional_to_the_terms():
    bars = draw_bars({"compute": 3.0, "bubble": 0.0, "fsdp": 1.0})
    assert len(bars) == 2
    assert bars[0].count("█") == 50
    assert bars[1] == "     fsdp " + "█" * 16 + "▋ 25.0 %"
