"""What an autoscaler has learned, as the text that a service's status keeps over restarts.

Compressed: it is for this program alone, and the status of a thousand services is held in memory by everybody who
watches them.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping

import orjson

from plimsoll.core import autoscaler

FORM = "zlib"
LIMIT = 1 << 20  # bytes of what is read; a hand-made text could unfold to anything


def write(service: autoscaler.Service) -> dict[str, str]:
    """About 4 KB a tier once there is history."""
    return {FORM: base64.b64encode(zlib.compress(orjson.dumps(autoscaler.to_dict(service)), 9)).decode()}


def recall(service: autoscaler.Service, kept: object) -> None:
    """Put back what `write` gave; whatever else it may be, the service begins anew."""
    text = kept.get(FORM) if isinstance(kept, Mapping) else None
    if not isinstance(text, str):
        return
    try:
        unfolded = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), LIMIT)
        autoscaler.restore(service, orjson.loads(unfolded))
    except (binascii.Error, zlib.error, ValueError):
        return
