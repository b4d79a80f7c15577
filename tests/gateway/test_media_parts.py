"""Pictures, sound and video count as what a model makes of them, not as their base64 text."""

from __future__ import annotations

import base64
import json
import random
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plimsoll.core.types import MediaKind
from plimsoll.gateway.body_forms import PREFIX_BYTES
from plimsoll.gateway.media_parts import (
    DEFAULT_TOKENS,
    MAX_BLOBS,
    MessageParts,
    image_tokens,
    split_media,
    split_messages,
)
from plimsoll.gateway.request_parser import ParsedRequest, parse_body

NOISE = random.Random(1).randbytes(400_000)
QUESTION = {"type": "text", "text": "What is this?"}


def split(text: bytes) -> MessageParts:
    return split_media(text, PREFIX_BYTES)


def png(width: int, height: int, size: int = 300_000) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height) + NOISE[:size]


def jpeg(width: int, height: int, size: int = 300_000) -> bytes:
    exif = b"\xff\xe1" + struct.pack(">H", 20_002) + NOISE[:20_000]
    frame = b"\xff\xc2" + struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes(9)
    return b"\xff\xd8" + exif + frame + NOISE[:size]


def gif(width: int, height: int, size: int = 300_000) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + NOISE[:size]


def webp(form: bytes, width: int, height: int, size: int = 300_000) -> bytes:
    if form == b"VP8X":
        inside = bytes(8) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    elif form == b"VP8L":
        inside = bytes(4) + b"\x2f" + (width - 1 | height - 1 << 14).to_bytes(4, "little")
    else:
        inside = bytes(10) + struct.pack("<HH", width, height)
    return b"RIFF" + bytes(4) + b"WEBP" + form + inside + NOISE[:size]


def image(data: bytes, mime: str = "image/jpeg") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"}}


def messages(*parts: Any) -> bytes:
    return json.dumps([{"role": "user", "content": list(parts)}]).encode()


def read(*parts: Any, **fields: Any) -> ParsedRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **fields}
    found = parse_body(json.dumps(body).encode())
    assert isinstance(found, ParsedRequest)
    return found


@pytest.mark.parametrize(
    "data",
    [
        png(1920, 1080),
        jpeg(1920, 1080),
        gif(1920, 1080),
        webp(b"VP8 ", 1920, 1080),
        webp(b"VP8L", 1920, 1080),
        webp(b"VP8X", 1920, 1080),
    ],
    ids=["png", "jpeg", "gif", "webp", "webp-lossless", "webp-extended"],
)
def test_image_counts_by_its_pixels(data: bytes) -> None:
    parts = split(messages(QUESTION, image(data)))
    assert parts.media_tokens == {MediaKind.IMAGE: 69 * 39}
    assert parts.text_bytes < 200


@pytest.mark.parametrize("size", [40, 100, 400, 1000])
@pytest.mark.parametrize("others", [0, 30_000])
def test_small_picture_counts_by_its_pixels(size: int, others: int) -> None:
    icon = png(32, 32, size)
    bare = {"type": "image", "source": {"media_type": "image/png", "data": base64.b64encode(icon).decode()}}
    photo = [image(png(280, 280, others))] if others else []
    parts = split(json.dumps([{"role": "user", "content": [*photo, image(icon), bare, QUESTION]}]).encode())
    assert parts.media_tokens == {MediaKind.IMAGE: 2 * 4 + 100 * len(photo)}
    assert parts.pictures.others == 0
    assert parts.text_bytes < 400


def test_image_tokens_are_patches_within_bounds() -> None:
    assert image_tokens(28, 28) == 4
    assert image_tokens(1024, 768) == 37 * 27
    assert image_tokens(20_000, 20_000) == 128 * 128


@pytest.mark.parametrize(
    "data", [NOISE, b"\x89PNG\r\n", b"\xff\xd8\xff\xe1\xff\xff" + NOISE[:500], png(0, 7), b"RIFFxxxxWEBPabcd" + NOISE]
)
def test_image_without_readable_size_has_default(data: bytes) -> None:
    data += NOISE[:2000]
    assert split(messages(image(data))).media_tokens == {MediaKind.IMAGE: DEFAULT_TOKENS[MediaKind.IMAGE]}


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}, MediaKind.IMAGE),
        ({"type": "input_image", "image_url": "https://example.com/cat.png"}, MediaKind.IMAGE),
        ({"type": "video_url", "video_url": {"url": "https://example.com/cat.mp4"}}, MediaKind.VIDEO),
        ({"type": "audio_url", "audio_url": {"url": "https://example.com/cat.mp3"}}, MediaKind.AUDIO),
    ],
)
def test_part_behind_url_has_default(part: dict[str, Any], kind: MediaKind) -> None:
    assert split(messages(QUESTION, part, part)).media_tokens == {kind: 2 * DEFAULT_TOKENS[kind]}


def test_audio_counts_by_its_length() -> None:
    data = base64.b64encode(NOISE[:320_000]).decode()
    sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    by_url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}}
    for part in (sound, by_url):
        parts = split(messages(QUESTION, part))
        assert parts.media_tokens == {MediaKind.AUDIO: 320}
        assert parts.text_bytes < 200


def wav(seconds: int, rate: int, channels: int, sample_bytes: int) -> bytes:
    frame = channels * sample_bytes
    form = struct.pack("<IHHIIHH", 16, 1, channels, rate, rate * frame, frame, 8 * sample_bytes)
    return b"RIFF" + bytes(4) + b"WAVEfmt " + form + b"data" + bytes(4 + seconds * rate * frame)


def mp3(seconds: int, kbits: int, tag_bytes: int = 0) -> bytes:
    index = {8: 1, 24: 3, 64: 5, 128: 9, 320: 14}[kbits]
    frame = struct.pack(">I", (0xFFF30000 if kbits < 32 else 0xFFFB0000) | index << 12)
    tag = b"ID3\4\0\0" + bytes((0, tag_bytes >> 14, tag_bytes >> 7 & 127, tag_bytes & 127)) + bytes(tag_bytes)
    return (tag if tag_bytes else b"") + frame + bytes(seconds * kbits * 125)


@pytest.mark.parametrize(
    "data",
    [
        wav(10, 8_000, 1, 1),
        wav(10, 16_000, 1, 2),
        wav(10, 48_000, 2, 3),
        mp3(10, 8),
        mp3(10, 24),
        mp3(10, 64),
        mp3(10, 320),
        mp3(10, 128, tag_bytes=300),
    ],
    ids=["wav-8", "wav-16", "wav-48-stereo", "mp3-8", "mp3-24", "mp3-64", "mp3-320", "mp3-tagged"],
)
def test_audio_of_any_rate_counts_by_its_seconds(data: bytes) -> None:
    text = base64.b64encode(data).decode()
    sound = {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}}
    by_url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{text}"}}
    for part in (sound, by_url):
        assert split(messages(QUESTION, part)).media_tokens[MediaKind.AUDIO] == pytest.approx(250, rel=0.1)


def test_video_and_file_are_no_text() -> None:
    data = base64.b64encode(NOISE).decode()
    video = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}}
    document = {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{data}", "filename": "a.pdf"}}
    parts = split(messages(video, document))
    assert parts.media_tokens == {MediaKind.VIDEO: 4096, MediaKind.IMAGE: 1024}
    assert parts.text_bytes < 300


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": "), (",\n", " : ")])
def test_spelling_of_json_does_not_matter(separators: tuple[str, str]) -> None:
    content = [QUESTION, image(png(280, 280)), {"type": "text", "text": "And this?"}, image(jpeg(280, 280))]
    text = json.dumps([{"role": "user", "content": content}], separators=separators).encode()
    assert split(text).media_tokens == {MediaKind.IMAGE: 200}
    assert split(text.replace(b"/", b"\\/")).media_tokens == {MediaKind.IMAGE: 200}
    assert split(text.replace(b"/", b"\\/")).text_bytes < 500


def test_escaped_slashes_of_bare_picture_do_not_matter() -> None:
    source = {"type": "base64", "media_type": "image/jpeg", "data": base64.b64encode(jpeg(280, 280)).decode()}
    text = messages({"type": "image", "source": source})
    assert split(text.replace(b"/", b"\\/")).media_tokens == split(text).media_tokens == {MediaKind.IMAGE: 100}


@pytest.mark.parametrize(
    "text", ["data:image/png;base64," + "A" * 40_000, "x" * 40_000, 'say "url": "data:' + "A" * 9999]
)
def test_text_stays_text(text: str) -> None:
    plain = json.dumps([{"role": "user", "content": text}]).encode()
    for raw in (plain, messages({"type": "text", "text": text})):
        assert split(raw) == MessageParts(raw, len(raw), {})


def test_more_parts_than_engines_take_count_as_text() -> None:
    many = messages(*[image(png(28, 28, 2000))] * (MAX_BLOBS + 100))
    assert split(many).text_bytes > 100 * 2000


def test_prompt_prefix_identifies_images() -> None:
    """Equal conversations share blocks; another picture in the place of the first shares none after it."""
    first, same, other = (read(QUESTION, image(data), QUESTION) for data in (png(9, 9), png(9, 9), jpeg(9, 9)))
    assert first.prompt_prefix == same.prompt_prefix != other.prompt_prefix


def test_prompt_prefix_has_length_of_its_tokens() -> None:
    """Blocks of a prefix are 128 tokens of 4 bytes, so a picture that an engine has cached counts as cached."""
    found = read(QUESTION, image(png(1920, 1080)), QUESTION)
    assert len(found.prompt_prefix) == pytest.approx(4 * found.prompt.tokens, abs=20)
    assert len(read(*[image(png(4000, 4000))] * 8).prompt_prefix) == PREFIX_BYTES


def test_prompt_is_text_and_media() -> None:
    text = "word " * 400
    found = read({"type": "text", "text": text}, image(png(1920, 1080)), n=2)
    assert found.media_tokens == {MediaKind.IMAGE: 2691}
    assert found.prompt.sequences == 2
    assert found.prompt.tokens == pytest.approx(2691 + len(text) // 4, abs=50)


def test_schema_of_response_format_is_a_kind_of_its_own() -> None:
    """Engines do not read it with the prompt; what theirs makes of it is learned."""
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": {"description": "x" * 4000}}}
    found, plain = read(QUESTION, response_format=form), read(QUESTION)
    assert found.media_tokens == {MediaKind.SCHEMA: len(json.dumps(form)) // 4}
    assert found.prompt.tokens == plain.prompt.tokens + found.media_tokens[MediaKind.SCHEMA]
    assert found.corrected_prompt({"schema": 0.05}).tokens == pytest.approx(plain.prompt.tokens + 50, abs=2)


@pytest.mark.parametrize("field", ["tools", "functions"])
def test_schemas_count_as_text_of_prompt(field: str) -> None:
    schema = [{"type": "function", "function": {"name": "f", "description": "x" * 4000}}]
    extra = read(QUESTION, **{field: schema}).prompt.tokens - read(QUESTION).prompt.tokens
    assert extra == pytest.approx(len(json.dumps(schema)) / 4, abs=2)


def test_schemas_of_completions_do_not_count() -> None:
    found = parse_body(b'{"model":"m","prompt":"' + b"x" * 400 + b'","tools":[1,2,3,4,5,6,7,8,9]}')
    assert isinstance(found, ParsedRequest)
    assert found.prompt.tokens == 100


@given(st.binary(max_size=3000))
@example(b"\\u")
def test_any_bytes_are_split(text: bytes) -> None:
    parts = split(text)
    assert 0 <= parts.text_bytes <= len(text)


@given(st.binary(max_size=300), st.integers(0, 60))
def test_any_image_header_is_measured(head: bytes, cut: int) -> None:
    for start in (b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"RIFF1234WEBP", b"GIF8", b""):
        raw = messages(image((start + head)[cut:] + bytes(3000)))
        tokens = split(raw).media_tokens[MediaKind.IMAGE]
        assert 4 <= tokens <= 16_384


@pytest.mark.parametrize(
    "content",
    [
        "[] {}",
        '[{"type": "image_url"}]',
        [QUESTION],
        [QUESTION, {"type": "image_url", "image_url": {"url": "http://a/b.png"}}],
        ["What is this?", {"type": "image_url", "image_url": {"url": "http://a/b.png"}}],  # vLLM takes text as a part
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (" , ", " : ")])
def test_messages_of_chat_have_media_of_part_lists(content: object, separators: tuple[str, str]) -> None:
    text = json.dumps([{"role": "user", "content": content}], separators=separators).encode().replace(b"[{", b"[ \n{")
    assert split_messages(text, PREFIX_BYTES) == split(text)
