"""The memory estimate is within 10 % of what the compiled plan needs of a device, for a grid of programs and plans."""

import pytest

from tests.support.eight_devices import eight_devices as eight_devices
from tests.support.full_only import full_but
from tests.support.memory_grid import GRID, compare, describe

ERROR = 0.10


QUICK = {("nnx", "wide", "tensor 2 x fsdp 4")}


@pytest.mark.parametrize("case", full_but(GRID, lambda case: case[:3] in QUICK), ids=describe)
def test_the_memory_estimate_is_within_a_tenth_of_what_xla_needs(case):
    found = compare(case)
    assert found.estimated_bytes == pytest.approx(found.measured_bytes, rel=ERROR)
