"""Configuration: TOML files at the edge, frozen structs inside, and the settings of a job."""

from resilient_jax.config.job_config import JobConfig
from resilient_jax.config.toml_loader import decode_toml, load_toml, override_values

__all__ = ["JobConfig", "decode_toml", "load_toml", "override_values"]
