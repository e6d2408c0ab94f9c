"""The one import of jaxlib's extension module, and names for its objects. Imports no jax.

jaxlib ships no usable types for it, so each alias below is Any, named after the object.
"""

from typing import Any, TypeAlias

from jaxlib import _jax as _jax_untyped  # pyright: ignore[reportAttributeAccessIssue]

jaxlib_runtime: Any = _jax_untyped

RuntimeClient: TypeAlias = Any
"""`jaxlib._jax.DistributedRuntimeClient`."""
RuntimeService: TypeAlias = Any
"""`jaxlib._jax.DistributedRuntimeService`."""
Collectives: TypeAlias = Any
"""`jaxlib._jax.CpuCollectives`."""
Backend: TypeAlias = Any
"""`jaxlib._jax.Client`: what `jax.devices()[0].client` is."""
Device: TypeAlias = Any
"""`jax.Device`."""

JaxRuntimeError: type[Exception] = _jax_untyped.JaxRuntimeError

BackendClass: Any = _jax_untyped.Client
DeviceClass: Any = _jax_untyped.Device
