"""The versions of software that all hosts of a job must have in common."""

import msgspec


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """The versions that must be equal on all hosts of a job.

    Attributes:
        python: the interpreter's version, because a script may be read by the interpreter's libraries.
        resilient_jax: the version of this package.
        jax: the version of JAX.
        jaxlib: the version of jaxlib.
    """

    python: str
    resilient_jax: str
    jax: str
    jaxlib: str
