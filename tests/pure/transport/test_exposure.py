"""An agent says at its start what others can read of its job."""

from pathlib import Path

import pytest

from resilient_jax.transport.credentials import Credentials, TlsFiles, describe_exposure

SECURED = Credentials("secret", TlsFiles.in_folder(Path("tls")))


@pytest.mark.parametrize("address", ["127.0.0.2", "::1", "[::1]"])
def test_what_stays_on_this_machine_is_not_exposed(address: str) -> None:
    assert describe_exposure("a", address, Credentials("secret")) == ""


@pytest.mark.parametrize("address", ["10.0.0.7", "pod-0.job", "fd00::7"])
def test_without_tls_it_is_said_what_can_be_read_and_what_to_do(address: str) -> None:
    said = describe_exposure("a", address, Credentials("secret"))
    assert said.startswith("a: the job's states")
    assert "--tls" in said
    assert describe_exposure("a", address, SECURED) == ""
