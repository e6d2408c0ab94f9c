"""The type of one array of a training state: in memory, in snapshots, in checkpoints and between workers."""

import msgspec


class LeafSpec(msgspec.Struct, frozen=True, array_like=True):
    """One array of a state, without its values.

    Attributes:
        path: of the leaf in its tree; `jax.tree_util.keystr`, in a checkpoint the names joined by "/".
        dtype: its name in numpy or ml_dtypes. Where values are stored, int4 and its kin take one int8 an element.
        shape: of the global array; of a random key: of its raw data.
        key_impl: the implementation of a random key, which is represented by its raw data; None for other arrays.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    key_impl: str | None = None

    def __str__(self) -> str:
        key = f" (data of a {self.key_impl} key)" if self.key_impl is not None else ""
        return f"{self.dtype}{list(self.shape)}{key}"
