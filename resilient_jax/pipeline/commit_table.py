"""What all hosts know before any of them updates its state: every sum of the step, by norm and digest.

A host that has the rows of all living hosts knows that each of them has its sums. So from then on the step cannot be
lost while a holder of each block lives. Rows of one unit from several holders must agree in every bit: that finds a
host that computes wrongly.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from resilient_jax.errors import PeerError
from resilient_jax.ids import HostName
from resilient_jax.pipeline.stage_runner import LOSS
from resilient_jax.pipeline.sum_pieces import StepSums
from resilient_jax.pipeline.task_timings import StageReport
from resilient_jax.state.array_digest import add_array
from resilient_jax.weighted_mean import WeightedMean, join_weights, read_divisor


class SumsDiffer(PeerError):
    """Holders of the same weights have different sums of a step: one of them computes wrongly. Nothing is updated."""


class UnitRow(msgspec.Struct, frozen=True):
    """What a host says about a unit.

    Attributes:
        unit: number of the unit.
        norm_squared: squared norm of the mean gradient, which is the sum divided by the number of microbatches; a
            float32.
        digest: BLAKE2b digest of the bits of all sums of the unit, 16 bytes.
    """

    unit: int
    norm_squared: float
    digest: bytes


class HostRows(msgspec.Struct, frozen=True):
    """What a host says about a step.

    Attributes:
        units: a row for each unit that the host holds.
        results: name to sum, of the scalar results that the host has: loss and metrics, and their weights.
        report: what the tasks of the host took; None in a step in which hosts do not tell that. The table does not
            depend on it.
        axes: sizes of the axes of the host's device mesh, on which the bits of norms depend.
    """

    units: tuple[UnitRow, ...]
    results: Mapping[str, float]
    report: StageReport | None = None
    axes: tuple[int, ...] = ()


class CommitTable(msgspec.Struct, frozen=True):
    """What all hosts say about a step.

    Attributes:
        divisor: float32 that sums of gradients are divided by: the number of microbatches, or what `read_divisor` makes
            of the loss's weight if the loss is a `WeightedMean`. Before the exchange only hosts with the last block
            know that weight.
        norm: norm of the mean gradient of the whole model, a float32; the same whichever hosts hold what.
        loss: mean loss of the step, a float32.
        results: path to mean, of the loss and of other scalar results.
    """

    divisor: float
    norm: float
    loss: float
    results: Mapping[str, float]


def make_rows(
    sums: StepSums,
    gradients: Mapping[int, Mapping[str, Any]],
    num_microbatches: int,
    report: StageReport | None = None,
    axes: tuple[int, ...] = (),
) -> HostRows:
    """Return the rows of this host.

    Args:
        sums: all sums of the step that this host needs.
        gradients: by unit number and name, the sums of each unit that this host holds; also those of variables.
        num_microbatches: how many microbatches each sum is over.
        report: what the tasks of this host took; None in a step in which hosts do not tell that.
        axes: sizes of the axes of this host's device mesh.
    """
    units, changed = [], sums.list_changed()
    for number, unit_sums in sorted(gradients.items()):
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(unit_sums):
            add_array(digest, name, unit_sums[name])
        # What becomes of variables is no gradient: it is in the digest, since holders must agree, and not in the norm.
        values = [unit_sums[name] for name in sorted(unit_sums.keys() - changed)]
        norm_squared = _square_mean(values, np.float32(num_microbatches)) if values else 0.0
        units.append(UnitRow(unit=number, norm_squared=float(norm_squared), digest=digest.digest()))
    results = {
        name: float(np.float32(value)) for name, value in sums.list_results().items() if np.shape(value) == ()
    }
    return HostRows(units=tuple(units), results=results, report=report, axes=axes)


def make_table(rows: Mapping[HostName, HostRows], num_microbatches: int) -> CommitTable:
    """Return what follows from the rows of all hosts.

    Args:
        rows: one entry for each living host.
        num_microbatches: how many microbatches each sum is over.

    Raises:
        SumsDiffer: two hosts have different sums of one unit, or of one result.
    """
    first_rows: dict[int, tuple[HostName, UnitRow]] = {}
    results: dict[str, float] = {}
    for host in sorted(rows):
        for row in rows[host].units:
            other, known = first_rows.setdefault(row.unit, (host, row))
            # Sums are exact, so holders have the same bits. Their norms are in floats, added up by shards: with other
            # axes they may differ. A norm that is no number is not equal to itself.
            norms = np.array([known.norm_squared, row.norm_squared], np.float32)
            is_same_norm = rows[other].axes != rows[host].axes or np.array_equal(
                norms[:1], norms[1:], equal_nan=True
            )
            if known.digest != row.digest or not is_same_norm:
                raise SumsDiffer(
                    f"unit {row.unit}: found sums {known.digest.hex()} on {other} and {row.digest.hex()} on {host}, "
                    "expected the same bits. Examine the processors and memory of both hosts"
                )
        _merge_results(results, host, rows[host].results)
    # Added in the order of units, in float32: not by who holds what. Of hosts with other axes the first one's counts.
    total = np.float32(0)
    for number in sorted(first_rows):
        total = np.float32(total + np.float32(first_rows[number][1].norm_squared))
    sums, count = join_weights(results), np.float32(num_microbatches)
    norm, divisor = np.sqrt(total), _choose_divisor(sums.get(LOSS), count)
    with np.errstate(invalid="ignore", over="ignore"):  # of sums that are not finite
        # Rows are of sums divided by the count, as most hosts do not know the weight of the loss before the exchange.
        if divisor != count:  # in float64: neither factor is rounded on the way
            norm = np.float32(float(norm) * float(count) / float(divisor))
        means = {name: float(_divide(summed, count)) for name, summed in sums.items()}
    return CommitTable(
        divisor=float(divisor), norm=float(norm), loss=means.get(LOSS, float("nan")), results=means
    )


def _merge_results(results: dict[str, float], host: HostName, found: Mapping[str, float]) -> None:
    """Add the results of a host. All gradients are divided by one of them: holders must agree on these, too."""
    for name, value in found.items():
        known = results.setdefault(name, value)
        if not np.array_equal(known, value, equal_nan=True):
            raise SumsDiffer(
                f"{name}: found a sum of {value} on {host} and of {known} on another host, expected the same bits. "
                "Examine the processors and memory of the hosts that have the same layers"
            )


def _choose_divisor(summed: Any, count: np.float32) -> np.float32:  # noqa: ANN401 - a number, or a `WeightedMean`
    """Return what a sum is divided by to get its mean."""
    return np.float32(read_divisor(summed.weight)) if isinstance(summed, WeightedMean) else count


def _divide(summed: Any, count: np.float32) -> np.float32:  # noqa: ANN401 - as above
    total = summed.total if isinstance(summed, WeightedMean) else summed
    return np.float32(total) / _choose_divisor(summed, count)


@jax.jit
def _square_mean(values: list[jax.Array], count: jax.Array) -> jax.Array:
    """Return the squared norm of the means."""
    return jnp.sum(jnp.stack([jnp.sum(jnp.square((value / count).astype(jnp.float32))) for value in values]))
