"""The contract of an erasure `Kernel`, as functions: every implementation passes all of CHECKS.

The shapes are few, and contain every edge of vectors, blocks and tiles, where a kernel may be wrong.

Example:
    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_the_numpy_kernel_keeps_the_contract(check):
        check(NumpyKernel())
"""

# The name of a check is its sentence.

import array
import random
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

from resilient_jax.erasure.buffers import Buffer
from resilient_jax.erasure.errors import ErasureCodeError
from resilient_jax.erasure.kernel import Kernel
from resilient_jax.erasure.matrix import Matrix, linear_combination
from resilient_jax.erasure.reed_solomon import ReedSolomon
from resilient_jax.erasure.self_test import make_reference_codec
from resilient_jax.erasure.shards import decode, encode

CODE = ReedSolomon(3, 2)
"""The code of the checks for which one shape is enough."""
LENGTHS = (0, 1, 2, 15, 31, 32, 33, 63, 64, 65, 127, 4095, 4096, 4097)
"""Lengths in bytes: 0, 1, and both sides of the width of every vector and of a page."""
LONG_BYTES = 2**20 + 3
"""More bytes than any kernel computes in one block, with a partial vector at the end."""
GUARD_BYTES = 64
"""Bytes before and after each destination, which show writes out of bounds."""

KernelCheck = Callable[[Kernel], None]


def make_random_buffers(count: int, length: int, seed: int = 0) -> list[bytes]:
    """Return random buffers, the same for the same arguments."""
    source = random.Random(f"{count} {length} {seed}")
    return [source.randbytes(length) for _ in range(count)]


def compute_expected(matrix: Matrix, sources: Sequence[bytes]) -> list[bytes]:
    """Return what `apply` should write, computed by tables in plain Python."""
    return [linear_combination(row, sources, bytes(len(sources[0]))) for row in matrix]


def apply_guarded(kernel: Kernel, matrix: Matrix, sources: Sequence[Buffer]) -> list[bytes]:
    """Return what `apply` writes to new memory; fail if `apply` writes out of bounds or to a source."""
    length = len(sources[0])
    before = [bytes(source) for source in sources]
    guarded = [bytearray(b"\xa5" * (length + 2 * GUARD_BYTES)) for _ in matrix]
    kernel.apply(matrix, sources, [memoryview(room)[GUARD_BYTES : GUARD_BYTES + length] for room in guarded])
    for room in guarded:
        assert room[:GUARD_BYTES] + room[GUARD_BYTES + length :] == b"\xa5" * (2 * GUARD_BYTES)
    assert [bytes(source) for source in sources] == before
    return [bytes(room[GUARD_BYTES : GUARD_BYTES + length]) for room in guarded]


def check_parity_is_that_of_reedsolo(kernel: Kernel) -> None:
    for code in (ReedSolomon(1, 1), CODE, ReedSolomon(2, 7), ReedSolomon(20, 2)):
        data = make_random_buffers(code.k, 48)
        parity = apply_guarded(kernel, code.parity_matrix, data)
        codec = make_reference_codec(code)
        for column in range(48):
            word = codec.encode(bytes(shard[column] for shard in data))
            assert bytes(shard[column] for shard in parity) == word[code.k :]


def check_every_length_works(kernel: Kernel) -> None:
    for length in LENGTHS:
        sources = make_random_buffers(CODE.k, length)
        found = apply_guarded(kernel, CODE.parity_matrix, sources)
        assert found == compute_expected(CODE.parity_matrix, sources), f"{length} bytes"


def check_every_alignment_works(kernel: Kernel) -> None:
    for offset in (1, 3, 8, 17):
        room = [memoryview(buffer) for buffer in make_random_buffers(CODE.k, 1000)]
        sources = [view[offset + i : offset + i + 321] for i, view in enumerate(room)]
        expected = compute_expected(CODE.parity_matrix, [bytes(view) for view in sources])
        assert apply_guarded(kernel, CODE.parity_matrix, sources) == expected, f"offset {offset}"


def check_long_buffers_are_done_to_the_end(kernel: Kernel) -> None:
    sources = make_random_buffers(CODE.k, LONG_BYTES)
    assert apply_guarded(kernel, CODE.parity_matrix, sources) == compute_expected(CODE.parity_matrix, sources)


def check_every_element_multiplies_every_element(kernel: Kernel) -> None:
    every_byte = bytes(range(256))
    matrix = tuple(bytes([factor]) for factor in range(256))
    assert apply_guarded(kernel, matrix, [every_byte]) == compute_expected(matrix, [every_byte])


def check_zero_rows_clear_and_unit_rows_copy(kernel: Kernel) -> None:
    sources = make_random_buffers(3, 100)
    assert apply_guarded(kernel, (bytes(3), b"\x00\x01\x00"), sources) == [bytes(100), sources[1]]


def check_any_lost_shards_are_computed(kernel: Kernel) -> None:
    data = make_random_buffers(CODE.k, 77)
    parity = [bytearray(77) for _ in range(CODE.m)]
    encode(CODE, kernel, data, parity)
    stripe = dict(enumerate([*data, *parity]))
    for lost in combinations(stripe, CODE.m):
        present = {shard: buffer for shard, buffer in stripe.items() if shard not in lost}
        decoded = {shard: bytearray(77) for shard in lost}
        decode(CODE, kernel, present, decoded)
        assert all(decoded[shard] == stripe[shard] for shard in lost), f"lost {lost}"


def check_a_source_may_be_given_twice(kernel: Kernel) -> None:
    (buffer,) = make_random_buffers(1, 50)
    assert apply_guarded(kernel, (b"\x01\x01", b"\x02\x01"), [buffer, buffer]) == [
        bytes(50),
        linear_combination(b"\x03", [buffer], bytes(50)),
    ]


def check_no_rows_do_nothing(kernel: Kernel) -> None:
    kernel.apply((), [b"abc"], [])


def check_threads_share_a_kernel(kernel: Kernel) -> None:
    sources = [memoryview(buffer) for buffer in make_random_buffers(CODE.k, 4 * 4096)]
    parity = [bytearray(4 * 4096) for _ in range(CODE.m)]

    def encode_range(start: int) -> None:
        cut = slice(start, start + 4096)
        encode(CODE, kernel, [view[cut] for view in sources], [memoryview(row)[cut] for row in parity])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(encode_range, range(0, 4 * 4096, 4096)))
    assert parity == compute_expected(CODE.parity_matrix, [bytes(view) for view in sources])


def check_buffers_that_do_not_fit_are_refused_and_nothing_is_written(kernel: Kernel) -> None:
    room = bytearray(range(200))
    view = memoryview(room)
    xor = (b"\x01\x01",)
    cases: dict[str, tuple[Matrix, list[Buffer], list[Buffer], str]] = {
        "unequal sources": (xor, [bytes(8), bytes(9)], [view[:8]], r"unequal length: found .*\[8, 9\]"),
        "a short destination": (xor, [bytes(8), bytes(8)], [view[:7]], r"unequal length: found .*\[7\]"),
        "no source": ((b"",), [], [view[:8]], "found no source"),
        "a short row": ((b"\x01",), [bytes(8), bytes(8)], [view[:8]], "expected 1 rows .* of length 2"),
        "rows for more": (xor * 2, [bytes(8), bytes(8)], [view[:8]], "found 2 rows"),
        "a read-only destination": (xor, [bytes(8), bytes(8)], [bytes(8)], "destination 0: found read-only"),
        "a source with gaps": (
            xor,
            [view[0:16:2], bytes(8)],
            [view[:8]],
            r"source 0: found strides of \(2,\)",
        ),
        "a destination with gaps": (
            xor,
            [bytes(8), bytes(8)],
            [view[0:16:2]],
            "destination 0: found strides",
        ),
        "floats": (xor, [array.array("f", [1.0, 2.0]), bytes(8)], [view[:8]], "source 0: .* format 'f'"),
        "a matrix": (
            xor,
            [bytes(8), memoryview(bytes(8)).cast("B", (2, 4))],
            [view[:8]],
            "source 1: found 2 dim",
        ),
        "no buffer": (xor, ["12345678", bytes(8)], [view[:8]], "source 0: found str"),
        "destinations on each other": (
            xor * 2,
            [bytes(8), bytes(8)],
            [view[:8], view[7:15]],
            "overlap each other",
        ),
        "in place": (xor, [view[:8], bytes(8)], [view[:8]], "source 0 overlaps a destination"),
        "a source before a destination": (xor, [bytes(8), view[:8]], [view[7:15]], "source 1 overlaps"),
        "a source behind a destination": (xor, [bytes(8), view[7:15]], [view[:8]], "source 1 overlaps"),
    }
    for name, (matrix, sources, destinations, message) in cases.items():
        refused = _refusal(kernel, matrix, sources, destinations)
        assert _matches(message, refused), f"{name}: {refused!r}"
        assert room == bytes(range(200)), name


def check_memory_side_by_side_is_no_overlap(kernel: Kernel) -> None:
    room = bytearray(make_random_buffers(1, 4 * 33)[0])
    parts = [memoryview(room)[i : i + 33] for i in range(0, len(room), 33)]
    expected = linear_combination(b"\x01\x01", [bytes(parts[0]), bytes(parts[2])], bytes(33))
    kernel.apply((b"\x01\x01", b"\x00\x01"), [parts[0], parts[2]], [parts[1], parts[3]])
    assert [bytes(parts[1]), bytes(parts[3])] == [expected, bytes(parts[2])]


CHECKS: tuple[KernelCheck, ...] = (
    check_parity_is_that_of_reedsolo,
    check_every_length_works,
    check_every_alignment_works,
    check_long_buffers_are_done_to_the_end,
    check_every_element_multiplies_every_element,
    check_zero_rows_clear_and_unit_rows_copy,
    check_any_lost_shards_are_computed,
    check_a_source_may_be_given_twice,
    check_no_rows_do_nothing,
    check_threads_share_a_kernel,
    check_buffers_that_do_not_fit_are_refused_and_nothing_is_written,
    check_memory_side_by_side_is_no_overlap,
)


def _refusal(kernel: Kernel, matrix: Matrix, sources: list[Buffer], destinations: list[Buffer]) -> str:
    try:
        kernel.apply(matrix, sources, destinations)
    except ErasureCodeError as error:
        return str(error)
    return "nothing was refused"


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None
