"""When the next failure is expected, and when hosts that are away are back, from the history of a job. Pure.

Failures of a host are a Poisson process whose rate has a Gamma prior: that of a published cluster, which weighs as much
as `PRIOR_EXPOSURE_S` of the job's own time (`policy.score`). What a host's own failures add to it is the
greater of two posterior means, over all of the job's time and over its last hours: a host that has begun to fail is
expected to fail again soon, and one that has been quiet since is trusted again. Rates of hosts add up. A host that
leaves after a notice has not failed: it is expected to leave again, and to come back, by its own record.

The time until a host is back is the mean of its own returns after the same cause; before it has had any, of its returns
after other causes, then of other hosts' after the same cause, then of all.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import msgspec

from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.policy.score import (
    HOUR_S,
    PRIOR_EXPOSURE_S,
    PRIOR_FAILURES_PER_HOST,
    describe_s,
)
from resilient_jax.protocol.recovery_records import (
    Absence,
    JobHistory,
    LossCause,
    LossRecord,
    TimedChange,
)

RECENT_S: Final = 6 * HOUR_S
"""A loss that was so long ago counts 1 / e in the rate of the last hours: a host seldom fails for longer than a working
day before somebody looks at it. With a longer time a host would stay suspect for days after it was mended."""
MAX_RECORDS: Final = 64
"""The hosts and causes that are counted one by one: the newest. The record stays small in a large job."""
MAX_WEIGHT: Final = 8
"""A mean follows a change of the machine after about so many measurements."""
_TEXTS: Final[Mapping[LossCause, str]] = {
    LossCause.WORKER: "its worker ended",
    LossCause.HOST: "the host was lost",
    LossCause.DEVICE: "a device of it failed",
    LossCause.LEFT_OUT: "it kept the others waiting",
    LossCause.NOTICE: "it got a notice to leave",
}


def estimate_rate(history: JobHistory, hosts: Collection[HostName], *, with_notices: bool = False) -> float:
    """Return the failures per second of these hosts, as long as they are members.

    Args:
        hosts: all hosts without a record are alike.
        with_notices: whether a host that leaves after a notice counts, too.
    """
    moments: dict[HostName, float] = {}
    recent: dict[HostName, float] = {}
    recorded = 0.0
    for record in history.host_losses:
        if record.cause is not LossCause.NOTICE:
            recorded += record.moments
        elif not with_notices:
            continue
        if record.host in hosts:
            age_s = history.observed_s - record.last_s
            moments[record.host] = moments.get(record.host, 0.0) + record.moments
            recent[record.host] = recent.get(record.host, 0.0) + record.recent * math.exp(-age_s / RECENT_S)
    # Gamma(shape = prior b, rate = b) after k failures in T has the mean (prior b + k) / (b + T), in 1 / s. With
    # weights e^(-age / tau) the exposure T is tau (1 - e^(-T / tau)).
    exposure_s = PRIOR_EXPOSURE_S + history.observed_s
    recent_exposure_s = PRIOR_EXPOSURE_S - RECENT_S * math.expm1(-history.observed_s / RECENT_S)
    own = math.fsum(
        max(moments[host] / exposure_s, recent[host] / recent_exposure_s) for host in sorted(moments)
    )
    num_others = len(hosts) - len(moments)
    # Failures that are too many to be recorded by host are those of any of the others.
    forgotten = max(history.failures - recorded, 0.0) if num_others else 0.0
    return own + (len(hosts) * PRIOR_FAILURES_PER_HOST + forgotten) / exposure_s


def expect_failure_s(history: JobHistory, hosts: Collection[HostName]) -> float:
    """Return after how many seconds the next failure among these hosts is expected, for what must not be too late.

    By the rate that decisions go by, as if one more failure had just come: what has never failed may do so soon.
    """
    # 1 / (lambda + 1 / (b + T)), in s: with k + 1 in place of k failures in the posterior mean.
    return 1 / (estimate_rate(history, hosts) + 1 / (PRIOR_EXPOSURE_S + history.observed_s))


def expect_return_s(history: JobHistory, host: HostName, prior_s: float) -> float:
    """Return how long after its loss a host is expected to be ready to join again, in seconds.

    Args:
        prior_s: seconds that are expected where no host has come back yet.
    """
    cause = next((one.cause for one in history.away if one.host == host), None)
    own = [record for record in history.host_losses if record.host == host and record.num_returns]
    same = [record for record in own if record.cause is cause]
    others = [record for record in history.losses if record.cause is cause and record.num_returns]
    for records in (same, own, others):
        if records:
            returns = sum(record.num_returns for record in records)
            return sum(record.return_s * record.num_returns for record in records) / returns
    return next((time.typical_s for time in history.times if time.change is TimedChange.RETURN), prior_s)


def list_expected(history: JobHistory) -> list[HostName]:
    """Return the hosts that are away and came back each of the last times: they are expected though nothing is there.

    A return that no leader measured says nothing.
    """
    returned = {record.host for record in history.host_losses if record.streak}
    return [absence.host for absence in history.away if absence.host in returned]


def forget_returns(history: JobHistory, hosts: Collection[HostName]) -> JobHistory:
    """Return the history after hosts did not come back: they are not expected again before they do."""
    return msgspec.structs.replace(history, host_losses=_end_streaks(history.host_losses, hosts))


def count_losses(
    history: JobHistory, lost: Mapping[HostName, LossCause], number: GenerationNumber
) -> JobHistory:
    """Return the history after members were lost, or left, at one moment; unchanged if there are none.

    Args:
        history: history before the losses.
        number: number of the generation without the lost hosts.
    """
    if not lost:
        return history
    failed = [cause for cause in lost.values() if cause is not LossCause.NOTICE]
    missed = [one.host for one in history.away if one.host in lost]
    by_host, by_cause = _end_streaks(history.host_losses, missed), history.losses
    for host, cause in lost.items():
        part = 1 / max(len(failed), 1) if cause is not LossCause.NOTICE else 1.0
        by_host = _add_loss(by_host, host, cause, part, history.observed_s)
        by_cause = _add_loss(by_cause, HostName(""), cause, part, history.observed_s)
    stay = tuple(one for one in history.away if one.host not in lost)
    new = tuple(Absence(host=host, cause=cause, number=number) for host, cause in lost.items())
    return msgspec.structs.replace(
        history,
        failures=history.failures + bool(failed),
        losses=by_cause,
        host_losses=by_host[-MAX_RECORDS:],
        away=(*stay, *new)[-MAX_RECORDS:],
    )


def add_return(history: JobHistory, host: HostName, cause: LossCause, seconds: float) -> JobHistory:
    """Return the history with the time after which a host was ready to join again; it is away no more."""
    return msgspec.structs.replace(
        history,
        losses=_add_return(history.losses, HostName(""), cause, seconds),
        host_losses=_add_return(history.host_losses, host, cause, seconds),
        away=tuple(one for one in history.away if one.host != host),
    )


def average(mean_s: float, count: int, seconds: float) -> float:
    """Return the mean of `count` measurements and one more: at first the mean of all, then an exponential one.

    >>> average(4.0, 1, 6.0)
    5.0
    """
    # m += (x - m) / min(n, MAX_WEIGHT)
    return mean_s + (seconds - mean_s) / min(count + 1, MAX_WEIGHT)


def describe_record(history: JobHistory, hosts: Iterable[HostName]) -> str:
    """Return why, and how often, hosts were lost, such as "c: its worker ended, 3 times in 1.2 h"; empty: none was."""
    texts = []
    for host in hosts:
        records = [record for record in history.host_losses if record.host == host]
        if not records:
            continue
        away = next((one.cause for one in history.away if one.host == host), records[-1].cause)
        of_cause = next((record.count for record in records if record.cause is away), 1)
        often = f", {of_cause} times in {describe_s(history.observed_s)}" if of_cause > 1 else ""
        others = sum(record.count for record in records) - of_cause
        texts.append(
            f"{host}: {_TEXTS[away]}{often}" + (f", {others} more of other causes" if others else "")
        )
    return "; ".join(texts)


def count_host_losses(history: JobHistory, host: HostName) -> int:
    """Return how often a host was lost, or left, for any cause."""
    return sum(record.count for record in history.host_losses if record.host == host)


def _add_loss(
    records: tuple[LossRecord, ...], host: HostName, cause: LossCause, part: float, now_s: float
) -> tuple[LossRecord, ...]:
    old = _find(records, host, cause)
    faded = old.recent * math.exp((old.last_s - now_s) / RECENT_S)
    new = msgspec.structs.replace(
        old, count=old.count + 1, moments=old.moments + part, recent=faded + part, last_s=now_s
    )
    return (*(one for one in records if one is not old), new)  # to the end: the newest last


def _add_return(
    records: tuple[LossRecord, ...], host: HostName, cause: LossCause, seconds: float
) -> tuple[LossRecord, ...]:
    old = _find(records, host, cause)
    new = msgspec.structs.replace(
        old,
        return_s=average(old.return_s, old.num_returns, seconds),
        num_returns=old.num_returns + 1,
        streak=old.streak + bool(host),
    )
    return tuple(new if one is old else one for one in records)


def _end_streaks(records: tuple[LossRecord, ...], hosts: Collection[HostName]) -> tuple[LossRecord, ...]:
    return tuple(msgspec.structs.replace(one, streak=0) if one.host in hosts else one for one in records)


def _find(records: tuple[LossRecord, ...], host: HostName, cause: LossCause) -> LossRecord:
    found = (one for one in records if one.host == host and one.cause is cause)
    return next(found, LossRecord(host=host, cause=cause))
