"""The disk of a campaign is unmounted however the campaign ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.disk import mount_disk
from tests.support.paths import ROOT
from tests.support.patience import patience, wait_until

DEADLINE_S = patience(6)
CAMPAIGN = """
import sys, time
from pathlib import Path
from tests.chaos.disk import mount_disk
with mount_disk(Path(sys.argv[1]), 1):
    print("mounted", flush=True)
    time.sleep(3600)
"""


@pytest.fixture(autouse=True)
def may_mount(tmp_path: Path) -> None:
    try:
        with mount_disk(tmp_path / "probe", 1):
            pass
    except OSError as error:
        pytest.skip(f"this process may not mount: {error}")


def test_at_its_end_the_files_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with mount_disk(folder, 1):
        assert os.path.ismount(folder)
        (folder / "log").write_text("said")
    assert not os.path.ismount(folder)
    assert (tmp_path / "run-kept" / "log").read_text() == "said"


def test_after_sigkill_nothing_is_mounted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", CAMPAIGN, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as campaign:
        assert campaign.stdout is not None
        assert campaign.stdout.readline() == "mounted\n"
        assert os.path.ismount(folder)
        campaign.send_signal(signal.SIGKILL)
    wait_until("the end of the mount", lambda: not os.path.ismount(folder))
