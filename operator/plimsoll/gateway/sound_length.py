"""The length of sound, by the bytes per second in its header.

Problem: a model reads tokens per second of sound. A second takes 4 kB as MP3 and 192 kB as 48 kHz stereo.

Idea: WAV and MP3 say their rate in the first bytes, as decoders read it. For other formats a typical rate stands. An
MP3 of variable rate counts by its first frame. The ratio that a service learns corrects what remains.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final

TOKENS_PER_SECOND: Final = 25  # of the Qwen-Audio family
DEFAULT_BYTES_PER_SECOND: Final = 25_000  # between MP3 and 16-bit WAV at 16 kHz
MIN_BYTES_PER_SECOND: Final = 1000  # a lower rate in a header is no speech
_LINEAR_FORMATS: Final = frozenset({1, 3, 6, 7, 0xFFFE})  # WAV: PCM, float, A-law, mu-law, extensible PCM
_HEADER_BYTES: Final = 36
_ID3_BYTES: Final = 10
_KBITS_MPEG1: Final = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)  # layer III, by index
_KBITS_MPEG2: Final = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)


def sound_seconds(size: int, read: Callable[[int, int], bytes]) -> float:
    """Returns the estimated length of `size` bytes of sound.

    `read` returns the bytes from an offset on, at least as many as its second argument says unless the sound ends. It
    may raise ValueError.
    """
    try:
        rate = _bytes_per_second(read)
    except (ValueError, struct.error):
        rate = 0
    return size / max(rate or DEFAULT_BYTES_PER_SECOND, MIN_BYTES_PER_SECOND)


def _bytes_per_second(read: Callable[[int, int], bytes]) -> int:
    """Returns the rate in the header, 0 without one. Raises ValueError or struct.error."""
    head = read(0, _HEADER_BYTES)
    if head.startswith(b"RIFF") and head[8:16] == b"WAVEfmt ":
        form, _, sample_rate, _, frame_bytes = struct.unpack_from("<HHIIH", head, 20)
        return sample_rate * frame_bytes if form in _LINEAR_FORMATS else 0
    if head.startswith(b"ID3"):
        a, b, c, d = head[6:_ID3_BYTES]  # seven bits each
        head = read(_ID3_BYTES + (a << 21 | b << 14 | c << 7 | d), 4)
    frame = struct.unpack_from(">I", head)[0]
    if frame >> 21 != 0x7FF or frame >> 17 & 3 != 1:  # no frame of layer III
        return 0
    kbits = _KBITS_MPEG1 if frame >> 19 & 3 == 3 else _KBITS_MPEG2
    return kbits[frame >> 12 & 15] * 125
