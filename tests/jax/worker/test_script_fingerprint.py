"""What of a script is compared between hosts."""

import sys
from pathlib import Path

import pytest

from resilient_jax.worker.script_fingerprint import describe_script


def test_a_users_module_counts_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "users_model_of_a_test.py").write_text("WIDTH = 1\n")
    __import__("users_model_of_a_test")
    try:
        before = describe_script()
        assert describe_script() == before
        (tmp_path / "users_model_of_a_test.py").write_text("WIDTH = 2\n")
        after = describe_script()
    finally:
        del sys.modules["users_model_of_a_test"]
    differing = {name for name in before if before[name] != after[name]}
    assert differing == {"module users_model_of_a_test"}


def test_installed_modules_count_by_their_versions_only() -> None:
    found = describe_script()
    modules = {name.removeprefix("module ").partition(".")[0] for name in found if name.startswith("module ")}
    assert not modules & {"jax", "numpy", "json", "os", "resilient_jax", "pytest"}
    assert found["version of numpy"]


def test_arguments_and_options_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.2"])
    found = describe_script()
    assert found["arguments"] == "['--lr', '0.2']"
    assert found["option jax_enable_x64"] == "False"


def test_a_file_that_is_gone_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "gone.py"), raising=False)
    assert "script" not in describe_script()
