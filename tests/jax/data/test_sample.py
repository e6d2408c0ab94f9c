"""A microbatch that hosts read to compare their data: its choice, its digest, and what follows from a difference."""

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from resilient_jax.data.microbatch_rows import ALL_ROWS
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.state.state_digest import NO_DIGEST
from resilient_jax.step.data_sample import DataSample, digest_batch, digest_data
from resilient_jax.worker.host_comparison import HostComparison
from resilient_jax.worker.standalone import StandaloneControl

BATCH = {"x": np.arange(6, dtype=np.float32), "y": (np.int32(3), np.zeros((0, 2)))}


class Source:
    """A source whose reads return what a list says, in turn."""

    def __init__(self, found):
        self.found = itertools.cycle(found)
        self.asked = []

    def expect(self, wanted):
        pass

    def lengths(self, step, index):
        return None

    def get(self, step, index, data_shard):
        self.asked.append((step, index, data_shard))
        result = next(self.found)
        if isinstance(result, Exception):
            raise result
        return result


HOSTS = [HostName("h0"), HostName("h1"), HostName("h2")]


class Control(StandaloneControl):
    """Keeps what is recorded."""

    def __init__(self):
        super().__init__(host="h0")
        self.recorded = []

    def record_event(self, kind, **detail):
        self.recorded.append((kind, detail))
        return StandaloneControl.record_event(self, kind, **detail)


def test_all_that_a_loss_may_depend_on_is_in_the_digest():
    x, y = BATCH["x"], BATCH["y"]
    others = [
        BATCH,
        {"x": np.nextafter(x, np.float32(9)), "y": y},
        {"x": x.view(np.int32), "y": y},
        {"x": x.reshape(2, 3), "y": y},
        {"z": x, "y": y},
        {"x": x[::-1], "y": y},
        {"x": x, "y": (np.int32(3), np.zeros((2, 0)))},
        {"x": x, "y": (np.int32(4), np.zeros((0, 2)))},
    ]
    assert len({digest_batch(batch).tobytes() for batch in others}) == len(others)


def test_equal_arrays_have_equal_digests_whatever_holds_them():
    strided = np.repeat(BATCH["x"], 2)[::2]
    for x in (BATCH["x"].copy(), strided, jnp.asarray(BATCH["x"])):
        assert digest_batch({**BATCH, "x": x}).tolist() == digest_batch(BATCH).tolist()
    assert digest_batch(jnp.ones(3, jnp.bfloat16)).shape == (2,)


def test_hosts_read_the_same_microbatch_once_and_in_time_each_index():
    chosen = [DataSample.choose(step, 5, 3) for step in range(0, 64 * 100, 64)]
    assert {(sample.step, sample.num_reads) for sample in chosen} == {(64 * k, 1) for k in range(100)}
    assert {sample.index for sample in chosen} == set(range(5))


@pytest.mark.parametrize(("step", "sampled"), [(0, 0), (1, 0), (64, 62)])
def test_a_host_alone_reads_twice_what_no_prefetcher_has_kept(step, sampled):
    source = Source([BATCH, {**BATCH, "x": BATCH["x"] + 1}])
    sample = DataSample.choose(step, 1, 1)
    first, second = sample.read(functools.partial(digest_data, source))
    assert source.asked == [(sampled, 0, ALL_ROWS)] * 2
    assert first.tolist() != second.tolist()


def test_a_microbatch_that_cannot_be_read_is_not_compared():
    for found in (OSError("gone"), [object()]):
        source = Source([found])
        assert DataSample.choose(64, 1, 2).read(functools.partial(digest_data, source)).tolist() == [
            list(NO_DIGEST)
        ]


@pytest.mark.parametrize(
    ("digests", "names", "said"),
    [
        ("aaa", None, ""),
        ("0a0", None, ""),
        ("aba", "h1", "found other arrays on h1, expected those of most hosts"),
        ("abc", "h0, h1, h2", "found other arrays on h0, h1, h2, expected the same in each read"),
    ],
)
def test_hosts_with_other_data_are_named_once_in_the_log_and_each_time_in_an_event(
    digests, names, said, capsys
):
    words = {"0": NO_DIGEST, "a": (0, 1), "b": (1, 0), "c": (5, 5)}
    control = Control()
    comparisons = [HostComparison(HOSTS, host, control) for host in HOSTS[::2]]
    for comparison, step in itertools.product(comparisons, (0, 64)):
        comparison.compare_data(DataSample(step, 3, 1), np.array([words[name] for name in digests], np.int32))
    steps = [] if names is None else [0, 64] * 2
    expected = [(EventKind.DATA_DIFFERS, {"hosts": names, "step": step, "microbatch": 3}) for step in steps]
    assert control.recorded == expected
    printed = capsys.readouterr().err
    assert printed.count("\n") == (names is not None)
    assert f"data: microbatch 3 of step 0: {said}" in printed or names is None


def test_a_host_alone_is_told_that_two_reads_differ(capsys):
    comparison = HostComparison(HOSTS[:1], HOSTS[0], Control())
    comparison.compare_data(DataSample(62, 0, 2), np.array([(1, 1), (2, 2)], np.int32))
    assert (
        "found different arrays in two reads on h0, expected the same in each read" in capsys.readouterr().err
    )
