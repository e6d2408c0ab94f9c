"""Skips tests that need a GPU where nvidia-smi lists none."""

import pytest

from resilient_jax.doctor.gpu_inventory import read_gpus

needs_gpu = pytest.mark.skipif(not read_gpus().gpus, reason="nvidia-smi lists no GPU")
