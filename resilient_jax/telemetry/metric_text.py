"""Metrics as words of a progress line."""

from collections.abc import Mapping


def format_metrics(metrics: Mapping[str, float]) -> list[str]:
    """Return "name value" for each metric, with five significant digits: a learning rate is often below 0.0001."""
    return [f"{name} {value:#.5g}" for name, value in metrics.items()]
