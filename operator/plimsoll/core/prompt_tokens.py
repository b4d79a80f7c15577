"""Estimated prompt tokens by kind of content, and their correction by learned ratios (`core.demand.token_ratios`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, TypeVar

from plimsoll.core.types import MediaKind

TEXT: Final = "text"
KINDS: Final = (TEXT, *MediaKind)
KindT = TypeVar("KindT", bound=str)


def corrected_tokens(tokens: float, media: Mapping[KindT, float], ratios: Mapping[str, float]) -> float:
    """Returns estimated tokens with the ratio of each kind. `media` are those of them that are no text."""
    if not ratios:
        return tokens
    text = max(0.0, tokens - math.fsum(media.values()))
    return ratios.get(TEXT, 1.0) * text + math.fsum(ratios.get(kind, 1.0) * count for kind, count in media.items())
