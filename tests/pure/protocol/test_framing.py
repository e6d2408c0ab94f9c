"""Frames on a byte stream."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_jax.protocol.framing import HEADER, MAX_FRAME_BYTES, FrameDecoder, FrameError, encode_frame


@given(messages=st.lists(st.binary(max_size=50)), cuts=st.lists(st.integers(1, 20)))
def test_messages_come_back_whole_and_in_order_however_the_bytes_are_cut(messages, cuts):
    stream = b"".join(map(encode_frame, messages))
    deframer, found = FrameDecoder(), []
    for size in cuts:
        piece, stream = stream[:size], stream[size:]
        found += deframer.feed(piece)
    assert found + deframer.feed(stream) == messages


def test_part_of_a_message_is_no_message():
    deframer = FrameDecoder()
    assert deframer.feed(encode_frame(b"hello")[:-1]) == []
    assert deframer.feed(b"o") == [b"hello"]


def test_a_message_too_long_is_refused_by_the_writer():
    with pytest.raises(
        FrameError, match=f"message of {MAX_FRAME_BYTES + 1} bytes; at most {MAX_FRAME_BYTES} fit"
    ):
        encode_frame(bytes(MAX_FRAME_BYTES + 1))


def test_a_length_that_cannot_be_ours_is_refused_before_its_bytes_come():
    with pytest.raises(FrameError, match=f"announces {MAX_FRAME_BYTES + 1} bytes; at most {MAX_FRAME_BYTES}"):
        FrameDecoder().feed(HEADER.pack(MAX_FRAME_BYTES + 1))
