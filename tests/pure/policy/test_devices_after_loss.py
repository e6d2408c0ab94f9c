"""Which slow devices a host leaves out: ResiHP's vectors, and all choices of a host one by one."""

import itertools
import random

import pytest

from resilient_jax.policy.devices_after_loss import DeviceChoice, choose_devices_to_leave_out, select_devices


def test_of_a_tensor_group_with_a_slow_member_the_power_of_two_is_kept_that_is_fastest():
    """ResiHP (arXiv 2605.06374): of speeds 1, 1, 1, 0.4 all four compute at 1.6, and two at 2.0."""
    choice = choose_devices_to_leave_out([(0, 1.0), (1, 1.0), (2, 1.0), (3, 0.4)], [3], "even")
    assert choice == DeviceChoice(out=(3,), used=(0, 1), speed=2.0 / 4)


def test_the_devices_used_are_the_fastest_power_of_two_of_resihp():
    """The fastest k, `argmax_{k = 2^q} k min_{i in top-k} p_i`."""
    chance = random.Random(1)
    for _ in range(300):
        size = chance.choice((2, 4, 8))
        slow = chance.sample(range(size), chance.randrange(1, size))
        speeds = [round(chance.uniform(0.1, 0.9), 2) if one in slow else 1.0 for one in range(size)]
        choice = choose_devices_to_leave_out(list(enumerate(speeds)), slow, "even")
        fastest_first = sorted(speeds, reverse=True)
        kept = max(count * fastest_first[count - 1] for count in (1, 2, 4, 8) if count <= size)
        assert choice is not None
        # Without a device that is left out none is faster; else that all stay is what the policy compares it with.
        assert max(choice.speed * size, size * min(speeds)) == pytest.approx(kept)


@pytest.mark.parametrize("after_loss", ["even", "all", "host"])
def test_no_other_choice_of_devices_is_faster(after_loss):
    chance = random.Random(2)
    for _ in range(300):
        numbers = sorted(chance.sample(range(12), chance.randrange(1, 7)))
        speeds = {number: round(chance.uniform(0.1, 1.0), 2) for number in numbers}
        slow = [number for number in numbers if speeds[number] < 0.8]
        choice = choose_devices_to_leave_out(list(speeds.items()), slow, after_loss)
        found = []
        for count in range(1, 1 + len(slow)):
            for out in itertools.combinations(slow, count):
                places = [numbers.index(number) for number in out]
                used = [numbers[place] for place in select_devices(len(numbers), places, after_loss)]
                if used:
                    found.append(len(used) * min(speeds[number] for number in used) / len(numbers))
        if not found:
            assert choice is None
            continue
        assert choice is not None
        assert set(choice.out) <= set(slow)
        assert choice.speed == pytest.approx(max(found))
        assert choice.speed == pytest.approx(
            len(choice.used) * min(speeds[number] for number in choice.used) / len(numbers)
        )


def test_a_host_with_one_device_or_that_needs_all_leaves_none_out():
    assert choose_devices_to_leave_out([(0, 1.0)], [0], "all") is None
    assert choose_devices_to_leave_out([(0, 1.0), (1, 0.2)], [1], "host") is None
    assert choose_devices_to_leave_out([(0, 1.0), (1, 0.9)], [], "all") is None
