"""A job on a machine whose environment names proxies, as many clusters' do."""

from pathlib import Path

import pytest

from tests.jobs.launched import JOBS, run_launch

NOBODY = "http://127.0.0.1:9"
PROXIES = {name: NOBODY for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY")}


@pytest.mark.full
def test_a_job_trains_although_proxies_are_set(tmp_path: Path) -> None:
    options = ["--devices-per-host", "2"]
    ended = run_launch(
        [str(JOBS / "sums.py")], tmp_path / "run", hosts=3, options=options, environment=PROXIES
    )
    assert ended.code == 0, ended.output
    assert "worker.not_forked" not in (tmp_path / "run" / "host-0.events.jsonl").read_text()
