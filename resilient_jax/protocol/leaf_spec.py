"""The type of one array of a training state: in memory, in snapshots, in checkpoints and between workers."""

import enum

import msgspec


class LeafKind(enum.StrEnum):
    """What a leaf of a state is in the user's script; `state.leaf_kinds` has the table of what becomes of each."""

    ARRAY = "JAX array"
    WEAK_ARRAY = "weakly typed JAX array"
    NUMPY_ARRAY = "NumPy array"
    NUMPY_SCALAR = "NumPy scalar"
    BOOL = "Python bool"
    INT = "Python int"
    FLOAT = "Python float"
    COMPLEX = "Python complex"


class LeafSpec(msgspec.Struct, frozen=True, array_like=True):
    """One array of a state, without its values.

    Attributes:
        path: path of the leaf in its tree, as `jax.tree_util.keystr`, in a checkpoint the names joined by "/".
        dtype: name in numpy or ml_dtypes. Where values are stored, int4 and its kin take one int8 an element.
        shape: shape of the global array; of a random key, of its raw data.
        key_impl: implementation of a random key, which is represented by its raw data; None for other arrays.
        kind: what the leaf is for the user; files of a checkpoint do not have it.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    key_impl: str | None = None
    kind: LeafKind = LeafKind.ARRAY

    def __str__(self) -> str:
        key = f" (data of a {self.key_impl} key)" if self.key_impl is not None else ""
        kind = f" (a {self.kind})" if self.kind is not LeafKind.ARRAY else ""
        return f"{self.dtype}{list(self.shape)}{key}{kind}"
