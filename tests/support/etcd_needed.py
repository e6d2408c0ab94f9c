"""Skips tests that need an etcd cluster where etcd is not installed."""

import shutil

import pytest

needs_etcd = pytest.mark.skipif(
    shutil.which("etcd") is None, reason="etcd is not installed: apt-get install etcd-server"
)
