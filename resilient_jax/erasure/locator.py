"""Which shards are wrong, from what the check equations say.

A shard that is damaged is damaged in many columns, and all of them point at it. Let H be the check matrix (r
rows, any r columns independent) and E the wrong shards. The syndrome of a column is a combination of the
columns of H at E. So the syndromes of several columns span a space inside span(H_E); with errors that vary they
span all of it. Then a shard belongs to E exactly if its column of H lies in that space, as long as E has at
most r - 1 shards: a column of H outside E and those of E are at most r together, hence independent.

This finds up to r - 1 wrong shards, where one column alone can tell no more than r // 2. Beyond r // 2 one
column can fit by accident, with probability 256^-(r - |E|), so more columns are asked for than the space has
dimensions. It is the joint location of interleaved Reed-Solomon codes (Metzner and Kapturowski, "A general
decoding technique applicable to replicated file disagreement location and concatenated code decoding", IEEE
Trans. Inf. Theory 36, 1990). The answer is a hypothesis: it holds for the columns that it was made of, and the
caller checks the rest.
"""

from collections.abc import Sequence

import reedsolo

from resilient_jax.erasure.matrix import Span, Vector, transpose
from resilient_jax.erasure.reed_solomon import Check, ReedSolomon
from resilient_jax.erasure.reference_codec import make_reference_codec

EVIDENCE_BYTES = 4
"""What must fit without need before more than r // 2 shards are blamed: by accident it does once in 256^4."""


def locate_jointly(check: Check, syndromes: Sequence[Vector]) -> tuple[int, ...] | None:
    """The shards whose errors explain the syndromes, if exactly one set of at most r - 1 shards does.

    Args:
        check: the equations, r of them.
        syndromes: of dirty columns, r bytes each.

    Returns: Shard indices, ascending; None if too many shards are wrong, if the errors are too much alike to
        tell, or if the columns are too few to believe it.
    """
    span, equations = Span(), len(check.matrix)
    for syndrome in syndromes:
        span.put(syndrome)
        if span.dimension == equations:
            return None  # every shard would fit
    columns = zip(check.shards, transpose(check.matrix), strict=True)
    inside = tuple(shard for shard, column in columns if span.contains(column))
    if len(inside) != span.dimension:
        return None
    evidence_bytes = (len(syndromes) - span.dimension) * (equations - span.dimension)
    # Up to half of the equations it is the only answer that few errors in each column allow.
    return inside if len(inside) <= equations // 2 or evidence_bytes >= EVIDENCE_BYTES else None


def locate_in_column(code: ReedSolomon, column: dict[int, int]) -> dict[int, int] | None:
    """The bytes of one column that are wrong, and what they should be: by reedsolo.

    Finds any (m - e) // 2 errors beside e absent shards. With more it may find a wrong answer: 2.9 % of the
    time for two errors at k = 8, m = 2.

    Args:
        code: k and m.
        column: the byte of each shard that is present.

    Returns:
        The right byte by shard index, where it differs; None if reedsolo finds no codeword near enough.
    """
    absent = [shard for shard in range(code.n) if shard not in column]
    codec = make_reference_codec(code)
    word = bytearray(column.get(shard, 0) for shard in range(code.n))
    try:
        _, right, _ = codec.decode(word, erase_pos=absent or None)
    except reedsolo.ReedSolomonError:
        return None
    return {shard: right[shard] for shard, byte in column.items() if right[shard] != byte}
