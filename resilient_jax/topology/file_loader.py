"""Loading of a topology from a file or from a TOML string."""

from pathlib import Path

from resilient_jax.errors import ConfigError
from resilient_jax.topology.builder import build_topology
from resilient_jax.topology.toml_decoder import decode_tables
from resilient_jax.topology.topology import Topology


def load_topology(path: str | Path) -> Topology:
    """Return the topology in a TOML file, as `meshes/README.md` describes it.

    Raises:
        ConfigError: the file cannot be read or is no topology; names file, key, found, expected, what to do.

    Example:
        >>> load_topology("meshes/h100_32x8.toml").without("host-07").device_count  # doctest: +SKIP
        248
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: found no such file, expected a topology file. "
            f"Check the path; it was looked for from {Path.cwd()}."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{path}: found a path that cannot be read ({error.strerror}), expected a topology file. "
            "Check the path and its permissions."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: found a byte that is not UTF-8 at offset {error.start}, expected a topology file. "
            "Save the file as UTF-8."
        ) from error
    return decode_topology(text, source=str(path))


def decode_topology(text: str, *, source: str) -> Topology:
    """Return the topology in a TOML string.

    Args:
        source: name of the text in messages.

    Raises:
        ConfigError: the text is no topology.
    """
    return build_topology(decode_tables(text, source=source), source=source)
