"""Frames between pickers: who does not know the secret can send nothing, repeat nothing and fill no memory."""

from __future__ import annotations

import struct

import msgspec
import pytest

from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES, MAX_REQUEST_TOKENS
from plimsoll.gateway.one_queue import messages
from plimsoll.gateway.one_queue.frames import HELLO_BYTES, MAX_FIRST_BYTES, MAX_FRAME_BYTES, FrameError, FrameSession
from plimsoll.gateway.prefix_hash import MAX_BLOCKS

SECRET = b"a secret of all gateways"


def pair(server_secret: bytes = SECRET) -> tuple[FrameSession, FrameSession]:
    """A client and a server that have exchanged their hellos."""
    client, server = FrameSession(SECRET, is_client=True), FrameSession(server_secret, is_client=False)
    assert client.feed(server.hello) == server.feed(client.hello) == []
    return client, server


def test_frames_arrive_in_order_in_any_pieces() -> None:
    client, server = pair()
    sent = b"".join(client.encode(b"%d" % n * n) for n in range(50))
    for size in (1, 7, 1000):
        received = [p for at in range(0, len(sent), size) for p in server.feed(sent[at : at + size])]
        assert received == [b"%d" % n * n for n in range(50)]
        client, server = pair()
        sent = b"".join(client.encode(b"%d" % n * n) for n in range(50))


def test_hello_in_pieces_opens_the_session() -> None:
    client, server = FrameSession(SECRET, is_client=True), FrameSession(SECRET, is_client=False)
    for byte in client.hello[:-1]:
        server.feed(bytes((byte,)))
    assert not server.is_open
    server.feed(client.hello[-1:])
    assert server.is_open


def test_wrong_secret_is_refused_at_the_first_frame() -> None:
    client, server = pair(b"another secret of others")
    with pytest.raises(FrameError, match="wrong digest"):
        server.feed(client.encode(b"hi"))


@pytest.mark.parametrize("position", range(4, 26))
def test_changed_byte_is_refused(position: int) -> None:
    client, server = pair()
    frame = bytearray(client.encode(b"payload"))
    frame[position] ^= 1
    with pytest.raises(FrameError, match="wrong digest"):
        server.feed(bytes(frame))


def test_repeated_frame_is_refused() -> None:
    client, server = pair()
    frame = client.encode(b"take a slot")
    assert server.feed(frame) == [b"take a slot"]
    with pytest.raises(FrameError, match="wrong digest"):
        server.feed(frame)


def test_frames_in_another_order_are_refused() -> None:
    client, server = pair()
    first, second = client.encode(b"1"), client.encode(b"2")
    with pytest.raises(FrameError, match="wrong digest"):
        server.feed(second + first)


def test_frame_sent_back_is_refused() -> None:
    client, _ = pair()
    with pytest.raises(FrameError, match="wrong digest"):
        client.feed(client.encode(b"hi"))


def test_session_recorded_earlier_is_refused() -> None:
    client, server = pair()
    recorded = client.hello + client.encode(b"hi")
    with pytest.raises(FrameError, match="wrong digest"):
        FrameSession(SECRET, is_client=False).feed(recorded)
    assert server.is_open


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_too_long_frame_is_refused_before_it_is_read(length: int) -> None:
    client, server = pair()
    assert server.feed(client.encode(b"hi")) == [b"hi"]
    with pytest.raises(FrameError, match="exceeds the limit"):
        server.feed(struct.pack("!I", length) + bytes(16))


def test_first_frame_is_short_because_nothing_is_proved() -> None:
    client, server = pair()
    with pytest.raises(FrameError, match="exceeds the limit of 2048"):
        server.feed(client.encode(bytes(MAX_FIRST_BYTES + 1))[:24])


def test_too_long_payload_is_not_sent() -> None:
    client, _ = pair()
    with pytest.raises(FrameError, match="exceeds the limit"):
        client.encode(bytes(MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"P", b"PLQ0"])
def test_other_protocol_is_refused(data: bytes) -> None:
    session = FrameSession(SECRET, is_client=False)
    if data == b"P":
        assert session.feed(data) == []
        data = b"OST"
    with pytest.raises(FrameError, match="another protocol"):
        session.feed(data + bytes(HELLO_BYTES))


def test_short_secret_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes"):
        FrameSession(b"too short", is_client=True)


QUESTION = messages.Question(
    1, "r", "team/chat", False, True, {}, 0.0, "chat", "/v1/chat/completions", 10, 1, None, True, 1, "prompt",
    2**64 - 1, None, (2**64 - 1,), "", "", b"", 10, {}, None, None, 0.0, "",
)  # fmt: skip


def test_question_survives_the_way() -> None:
    assert messages.decode_to_owner(messages.encode(QUESTION)) == QUESTION


@pytest.mark.parametrize(
    "changes",
    [
        {"request_id": ""},
        {"request_id": "x" * 65},
        {"service": "x" * 601},
        {"prompt_tokens": -1},
        {"prompt_tokens": 10**9},
        {"sequences": 0},
        {"sequences": 10**7},
        {"max_tokens": 0},
        {"age_s": float("nan")},
        {"age_s": float("inf")},
        {"complete_in_s": float("nan")},
        {"block_hashes": tuple(range(513))},
        {"block_hashes": (-1,)},
        {"estimate_media": {"smell": 1}},
        {"request_class": bytes(65537)},
        {"rate_headers": {str(n): "" for n in range(33)}},
        {"number": "1"},
    ],
)
def test_question_beyond_a_bound_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        messages.decode_to_owner(messages.encode(msgspec.structs.replace(QUESTION, **changes)))


def test_too_many_requests_in_one_message_are_refused() -> None:
    running = messages.Running("r", "team/chat", "a", None, 0.0, 0.0, "", "", 0, 1, None, 1, (), False, "/")
    with pytest.raises(msgspec.ValidationError):
        messages.decode_to_owner(messages.encode(messages.RunningRequests([running] * (messages.MAX_BATCH + 1))))


def test_longest_message_of_running_requests_fits_one_frame() -> None:
    """Otherwise a gateway that carries many long prompts could not connect to an owner at all."""
    name, address = "\U0001f600" * 600, "\U0001f600" * 100
    running = messages.Running(
        "\U0001f600" * 64, name, address, address, 1e6, 1e6, name, name, 2**64 - 1, MAX_REQUEST_TOKENS, 2**62,
        MAX_REQUEST_SEQUENCES, (2**64 - 1,) * MAX_BLOCKS, True, name,
    )  # fmt: skip
    payload = messages.encode(messages.RunningRequests([running] * messages.MAX_BATCH))
    assert len(payload) <= MAX_FRAME_BYTES
    assert messages.decode_to_owner(payload) == messages.RunningRequests([running] * messages.MAX_BATCH)
