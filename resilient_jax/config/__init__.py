"""TOML at the edge, frozen structs inside: `load`, `decode`, `override`, and the knobs of a job."""

from resilient_jax.config.job import JobConfig
from resilient_jax.config.loading import decode, load, override

__all__ = ["JobConfig", "decode", "load", "override"]
