"""Model files: the sizes of a model in TOML; `configs/` has those of published models."""

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from resilient_jax.config import load_toml
from resilient_jax.errors import ConfigError
from resilient_jax.planning.transformer import TransformerShape, count_parameters


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model file: the model's name, the source of its sizes, and the sizes."""

    name: Annotated[str, Meta(min_length=1)]
    source: Annotated[str, Meta(min_length=1)]
    """Publication of the sizes."""
    transformer: TransformerShape
    parameters: Annotated[int, Meta(ge=1)] | None = None
    """The published number of parameters; sizes that give another number are refused."""

    def __post_init__(self) -> None:
        if self.parameters is not None and (counted := count_parameters(self.transformer)) != self.parameters:
            raise ValueError(
                f"parameters = {self.parameters:_}, but the sizes in [transformer] give {counted:_}"
            )


def load_model_shape(path: str | Path) -> ModelShape:
    """Return the sizes of a model from a TOML file, such as `configs/llama3_70b.toml`.

    Args:
        path: path of the TOML file.

    Raises:
        ConfigError: the file cannot be read, or describes no model; the message names file and key.
    """
    try:
        return load_toml(path, ModelShape)
    except ConfigError as error:
        if keys := _find_foreign_keys(path):
            raise ConfigError(
                f"{path}: found {', '.join(keys)} and no table [transformer], expected the shape of a model. Settings "
                "of a job, a script or a mesh are no model; configs/llama3_70b.toml is one"
            ) from error
        raise


def _find_foreign_keys(path: str | Path) -> list[str]:
    """Return the keys of a TOML file that has no table [transformer]; none if it has one, or is no TOML."""
    try:
        values = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    return [] if "transformer" in values else [f"'{key}'" for key in values]
