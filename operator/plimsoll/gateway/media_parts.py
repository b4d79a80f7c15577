"""Estimates the tokens of pictures, sound and video in a conversation, which are not those of their base64 text.

Problem: a picture of 700 kB counted as 230,000 tokens of text, and its engine reads a thousand. But a body may have
8 MiB, may be hostile, and is measured in the event loop.

Idea: base64 has no quotation marks. Probes at a fixed distance find the long stretches without one, at a cost that is
linear in the size, and the bytes before such a stretch say whether it is media. The size of a picture is in its first
bytes. Its tokens follow the patches of 28 x 28 pixels of the Qwen-VL family until the service is known
(`picture_tokens`). What a service's own model makes of a part is learned as a ratio (`core.demand.token_ratios`).
"""

from __future__ import annotations

import binascii
import re
import struct
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh3_64_digest

from plimsoll.core.types import MediaKind
from plimsoll.gateway.byte_search import count_unicode_escapes, has_unicode_escape
from plimsoll.gateway.picture_tokens import DEFAULT_RULE, Pictures
from plimsoll.gateway.sound_length import TOKENS_PER_SECOND, sound_seconds

DEFAULT_TOKENS: Final = {MediaKind.IMAGE: 1024, MediaKind.AUDIO: 500, MediaKind.VIDEO: 4096}  # of a part behind a URL
PROBES: Final = 4096  # bounds the time for one body
MIN_PROBE_BYTES: Final = 256
MIN_PROBE_BYTES_LONG: Final = 1024  # in a long text
MAX_BLOBS: Final = 512  # further ones count as text
MAX_MEASURED_IMAGES: Final = 64  # further ones count as those behind a URL
BYTES_PER_TOKEN: Final = 4  # of text in UTF-8
ESCAPE_BYTES: Final = 6  # of `\u4e16`
LONG_TEXT_BYTES: Final = 64 * 1024  # in a longer text, parts behind URLs do not matter

_KEY: Final = re.compile(rb'"(url|image_url|audio_url|video_url|data|file_data)"\s*:\s*"\Z')
_KEY_BYTES: Final = 40
_SMALL_STRING: Final = re.compile(rb'"(?:url|image_url|data)"\s*:\s*"([^"]{60,2047})"')  # between two probes
_MEDIA_SIGNS: Final = b'_url"', b'"input_audio"', b'"file_data"', b'"source"'  # a text without them has no media
_PART_LIST: Final = re.compile(rb'\[\s*["{]')  # vLLM takes text as a part too
_IMAGE_PART: Final = re.compile(rb'"type"\s*:\s*"image"')  # of Anthropic's API, with base64 text or a URL
_PART_KEYS: Final = {
    MediaKind.IMAGE: (b'"image_url":',),
    MediaKind.AUDIO: (b'"audio_url":', b'"input_audio":'),
    MediaKind.VIDEO: (b'"video_url":',),
}
_ESCAPED_WORDS: Final = re.compile(rb"\\u(?!00)")  # some clients escape signs of base64, which are in ASCII
_HEAD_BYTES: Final = 64  # of base64; enough for the sizes in PNG, GIF and WebP
_SLASH_BYTES: Final = 4096  # of base64, which have a slash
_UNESCAPED_BYTES: Final = 32 * 1024  # of base64, read for the sizes after an EXIF segment
_MAX_JPEG_SEGMENTS: Final = 64


class MessageParts(msgspec.Struct):
    """The parts of `messages`.

    `prefix` is the start of its raw JSON; in the place of base64 text it has digests, as long as text of its tokens.
    `text_bytes` is the size in UTF-8 without base64 text. `media_tokens` are estimated tokens by kind.
    """

    prefix: bytes
    text_bytes: int
    media_tokens: dict[MediaKind, int]
    pictures: Pictures = Pictures()


class _Blob(NamedTuple):
    """The base64 text of one part: `text[start:end]`."""

    kind: MediaKind
    start: int
    end: int


def split_messages(messages: bytes, max_prefix: int) -> MessageParts:
    """As `split_media`, for the messages of a chat. Only their lists of parts have media; most chats have none."""
    if messages.find(b"[", 1) < 0 or not _PART_LIST.search(messages, 1):
        return MessageParts(messages[:max_prefix], utf8_bytes(messages), {})
    return split_media(messages, max_prefix)


def split_media(text: bytes, max_prefix: int) -> MessageParts:
    """Returns the parts of `messages` as raw JSON, with a prefix of at most `max_prefix` bytes. Never raises.

    8 MiB with up to 64 pictures take a few milliseconds.
    """
    if len(text) <= LONG_TEXT_BYTES and not any(sign in text for sign in _MEDIA_SIGNS):
        return MessageParts(text[:max_prefix], utf8_bytes(text), {})
    blobs = list(islice(_find_blobs(text), MAX_BLOBS))
    rest = _without(text, blobs) if blobs else text
    blob_tokens, sizes = _blob_tokens(text, blobs)
    counts, tokens = dict.fromkeys(MediaKind, 0), dict.fromkeys(MediaKind, 0)
    for blob, count in zip(blobs, blob_tokens, strict=True):
        counts[blob.kind] += 1
        tokens[blob.kind] += count
    if len(rest) <= LONG_TEXT_BYTES:
        small = _small_pictures(rest, MAX_MEASURED_IMAGES - len(sizes))
        rest, sizes = _without(rest, [blob for blob, _ in small]), (*sizes, *(size for _, size in small))
        counts[MediaKind.IMAGE] += len(small)
        tokens[MediaKind.IMAGE] += sum(image_tokens(*size) for _, size in small)
        for kind, keys in _PART_KEYS.items():
            by_url = sum(rest.count(key) for key in keys) - counts[kind]
            by_url += len(_IMAGE_PART.findall(rest)) if kind is MediaKind.IMAGE else 0
            tokens[kind] += max(0, by_url) * DEFAULT_TOKENS[kind]
    media_tokens = {kind: count for kind, count in tokens.items() if count}
    prefix = _prefix(text, blobs, blob_tokens, max_prefix)
    others = (tokens[MediaKind.IMAGE] - sum(image_tokens(*size) for size in sizes)) // DEFAULT_TOKENS[MediaKind.IMAGE]
    return MessageParts(prefix, utf8_bytes(rest), media_tokens, Pictures(sizes, others))


def utf8_bytes(text: bytes) -> int:
    r"""Returns the size of JSON text in UTF-8, without the `\u` escapes by which many clients send other scripts.

    Long text that begins without escapes counts as it is. All escapes of another text are counted: what follows from
    its beginning alone lets a client hide the rest.
    """
    sample = text[:LONG_TEXT_BYTES]
    if b"\\" not in sample or not has_unicode_escape(sample):
        return len(text)
    escapes, low = count_unicode_escapes(text)  # from \u0800 on, three bytes; before, two
    return max(0, len(text) - (ESCAPE_BYTES - 3) * escapes - low)  # the last escape may be cut off


def image_tokens(width: int, height: int) -> int:
    """Returns the tokens of a picture of so many pixels before its model is known."""
    return DEFAULT_RULE.tokens(width, height)


def _find_blobs(text: bytes) -> Iterator[_Blob]:
    """Yields the media parts of at least two probe distances, in order."""
    step = MIN_PROBE_BYTES if len(text) <= LONG_TEXT_BYTES else max(MIN_PROBE_BYTES_LONG, len(text) // PROBES)
    position = step
    while position < len(text):
        end = text.find(b'"', position)
        if end < 0:
            return
        if end - position >= step:
            start = text.rfind(b'"', 0, position) + 1
            kind = _media_kind(text, start, end)
            if kind is not None:
                yield _Blob(kind, start, end)
            position = end
        position += step


def _small_pictures(text: bytes, most: int) -> list[tuple[_Blob, tuple[int, int]]]:
    """Returns pictures that no probe met, such as icons, and their sizes."""
    found: list[tuple[_Blob, tuple[int, int]]] = []
    for match in _SMALL_STRING.finditer(text):
        if len(found) >= most:
            break
        start, end = match.span(1)
        if _media_kind(text, start, end) is MediaKind.IMAGE and (size := _image_size(text, start, end)) is not None:
            found.append((_Blob(MediaKind.IMAGE, start, end), size))
    return found


def _media_kind(text: bytes, start: int, end: int) -> MediaKind | None:
    """Returns the kind of the string `text[start:end]`, None if it is text."""
    key = _KEY.search(text[max(0, start - _KEY_BYTES) : start])
    if key is None:
        return None
    head = text[start : start + 16]
    if not head.startswith(b"data:"):
        return _bare_kind(text, start) if key[1] == b"data" and _may_be_base64(text, start, end) else None
    if head.startswith(b"data:audio"):
        return MediaKind.AUDIO
    return MediaKind.VIDEO if head.startswith(b"data:video") else MediaKind.IMAGE


def _may_be_base64(text: bytes, start: int, end: int) -> bool:
    """False for words of any script: arguments of a tool and text documents have the key `data` too.

    All of the string is read, or a client could hide text behind a beginning without spaces.
    """
    if text.find(b" ", start, end) >= 0 or not text[start:end].isascii():
        return False
    return text.find(b"\\u", start, end) < 0 or not _ESCAPED_WORDS.search(text, start, end)


def _bare_kind(text: bytes, start: int) -> MediaKind:
    """Returns the kind of base64 text without a media type, by its first bytes. Sound has no common first bytes."""
    try:
        head = _decode(*_payload(text, start, start + _HEAD_BYTES), 0, 12)
    except ValueError:
        return MediaKind.AUDIO
    is_image = head.startswith((b"\x89PNG", b"\xff\xd8\xff", b"GIF8")) or head[8:12] == b"WEBP"
    return MediaKind.IMAGE if is_image else MediaKind.AUDIO


def _blob_tokens(text: bytes, blobs: list[_Blob]) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """Returns the estimated tokens of each part, and the sizes of pictures that could be measured."""
    tokens, images, sizes = [], 0, []
    for blob in blobs:
        count = DEFAULT_TOKENS[blob.kind]
        if blob.kind is MediaKind.IMAGE and images < MAX_MEASURED_IMAGES:
            images += 1
            size = _image_size(text, blob.start, blob.end)
            if size is not None:
                sizes.append(size)
                count = image_tokens(*size)
        elif blob.kind is MediaKind.AUDIO:
            count = max(1, int(_sound_seconds(text, blob.start, blob.end) * TOKENS_PER_SECOND))
        tokens.append(count)
    return tokens, tuple(sizes)


def _without(text: bytes, blobs: list[_Blob]) -> bytes:
    """Returns the text without base64 text."""
    pieces, position, view = [], 0, memoryview(text)
    for blob in blobs:
        pieces.append(view[position : blob.start])
        position = blob.end
    return b"".join((*pieces, view[position:]))


def _prefix(text: bytes, blobs: list[_Blob], blob_tokens: list[int], max_bytes: int) -> bytes:
    pieces: list[bytes | memoryview] = []
    position = size = 0
    view = memoryview(text)
    for blob, tokens in zip(blobs, blob_tokens, strict=True):
        if size >= max_bytes:
            break
        digest = xxh3_64_digest(view[blob.start : blob.end])
        pieces += [view[position : blob.start], digest * (tokens * BYTES_PER_TOKEN // len(digest))]
        size += len(pieces[-2]) + len(pieces[-1])
        position = blob.end
    return b"".join((*pieces, view[position : position + max_bytes]))[:max_bytes]


def _image_size(text: bytes, start: int, end: int) -> tuple[int, int] | None:
    """Returns width and height in pixels from the header of a picture, None if they are not found there."""
    text, start, end = _payload(text, start, end)
    try:
        head = _decode(text, start, end, 0, 30)
        if head.startswith(b"\x89PNG\r\n") and head[12:16] == b"IHDR":
            width, height = struct.unpack_from(">II", head, 16)
        elif head.startswith(b"\xff\xd8"):
            width, height = _jpeg_size(text, start, end)
        elif head.startswith(b"RIFF") and head[8:12] == b"WEBP":
            width, height = _webp_size(head)
        elif head.startswith(b"GIF8"):
            width, height = struct.unpack_from("<HH", head, 6)
        else:
            return None
    except (ValueError, IndexError, struct.error):
        return None
    return (width, height) if width > 0 and height > 0 else None


def _sound_seconds(text: bytes, start: int, end: int) -> float:
    size = (end - start) * 3 // 4
    text, start, end = _payload(text, start, end)
    return sound_seconds(size, lambda offset, count: _decode(text, start, end, offset, count))


def _payload(text: bytes, start: int, end: int) -> tuple[bytes, int, int]:
    r"""Returns base64 text after the media type of a `data:` URL, as `text[start:end]`.

    Some serialisers escape slashes (`\/`), which shifts the offsets. Then it returns the first bytes without escapes.
    """
    if text.startswith(b"data:", start):
        start = text.find(b",", start, min(start + _HEAD_BYTES, end)) + 1 or start
    if text.find(b"\\/", start, min(start + _SLASH_BYTES, end)) < 0:
        return text, start, end
    piece = text[start : min(start + _UNESCAPED_BYTES, end)].translate(None, b"\\")  # in equal time for any text
    return piece, 0, len(piece)


def _decode(text: bytes, start: int, end: int, offset: int, count: int) -> bytes:
    """Returns bytes of base64 text from `offset` on, at least `count` unless it ends. Raises ValueError."""
    first = start + offset // 3 * 4
    piece = text[first : min(end, first + (count // 3 + 2) * 4)]
    if b"\\" in piece:
        raise ValueError("an escape shifts the offsets")
    return binascii.a2b_base64(piece[: len(piece) // 4 * 4])[offset % 3 :]


def _jpeg_size(text: bytes, start: int, end: int) -> tuple[int, int]:
    """Skips from segment to segment to the frame header. Raises ValueError, IndexError or struct.error without one."""
    offset = 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        segment = _decode(text, start, end, offset, 9)
        if segment[0] != 0xFF:
            break
        marker = segment[1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", segment, 5)
            return width, height
        offset += 2 + struct.unpack_from(">H", segment, 2)[0]
    raise ValueError("no frame header")


def _webp_size(head: bytes) -> tuple[int, int]:
    form = head[12:16]
    if form == b"VP8X":
        return 1 + int.from_bytes(head[24:27], "little"), 1 + int.from_bytes(head[27:30], "little")
    if form == b"VP8L":
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if form != b"VP8 ":
        raise ValueError("an unknown form of WebP")
    width, height = struct.unpack_from("<HH", head, 26)
    return width & 0x3FFF, height & 0x3FFF
