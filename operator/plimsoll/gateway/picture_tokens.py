"""Tokens of a picture by the family of the model that reads it.

Problem: a picture of 1280 x 720 pixels has 1,196 tokens for Qwen2.5-VL, 256 for Gemma 3 and 1,280 for InternVL. These
rules differ in shape, so that no ratio to one of them is right for pictures of several sizes.

Idea: the repository's name of a model tells its family. The rules are those of the models' own processors, without the
few tokens around a picture. The pixels to which Qwen-VL scales a picture may be bounded by the engine's arguments. A
model of no known family has Qwen-VL's rule, and the ratio that its engines show (`core.demand.token_ratios`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from plimsoll.adapters.normalize import value_at
from plimsoll.engines.registry import engine_named

MAX_SIDES: Final = 200  # times the other side; Qwen-VL refuses longer pictures
UNKNOWN_SIZE: Final = (896, 896)  # of a picture behind a URL: 1,024 tokens for Qwen2.5-VL


class PictureFamily(StrEnum):
    """Families of models whose pictures have tokens of one rule."""

    QWEN_28 = "qwen2-vl"
    QWEN_32 = "qwen3-vl"
    GEMMA = "gemma-3"
    LLAMA = "llama-4"
    INTERNVL = "internvl"
    PIXTRAL = "pixtral"
    MISTRAL = "mistral-small"


DEFAULT_FAMILY: Final = PictureFamily.QWEN_28
_NAMES: Final = (
    (re.compile(r"qwen-?3(\.\d+)?-?(vl|omni)|qwen-?3\.[5-9]", re.I), PictureFamily.QWEN_32),
    (re.compile(r"gemma-?3", re.I), PictureFamily.GEMMA),
    (re.compile(r"llama-?4", re.I), PictureFamily.LLAMA),
    (re.compile(r"intern-?vl", re.I), PictureFamily.INTERNVL),
    (re.compile(r"pixtral", re.I), PictureFamily.PIXTRAL),
    (re.compile(r"mistral-(small|medium)-3|magistral-small-1\.[2-9]|devstral-small-2", re.I), PictureFamily.MISTRAL),
)


class PictureRule(NamedTuple):
    """How a model reads pictures: its family, and the pixels to which an engine scales one, None for the model's."""

    family: PictureFamily = DEFAULT_FAMILY
    least_pixels: int | None = None
    most_pixels: int | None = None

    def tokens(self, width: int, height: int) -> int:
        """Returns the tokens of a picture of so many pixels."""
        scaling = _SCALINGS.get(self.family)
        if scaling is None:
            return _RULES[self.family](width, height)
        least, most = self.least_pixels or scaling.least_pixels, self.most_pixels or scaling.most_pixels
        return _Scaling(scaling.patch, least, most).tokens(width, height)


DEFAULT_RULE: Final = PictureRule()


def picture_rule(service: object) -> PictureRule:
    """Returns the rule of an InferenceService. Arguments with which its engines do not start bound no pixels."""
    args, env, runtime = (value_at(service, "spec", "engine", name) for name in ("args", "env", "runtime"))
    engine = engine_named(runtime if isinstance(runtime, str) else None)
    try:
        bounds = engine.pixel_bounds(engine.all_args(args if isinstance(args, list) else (), env))
    except ValueError:
        bounds = (None, None)
    return PictureRule(family_of(str(value_at(service, "spec", "model", "uri"))), *bounds)


def family_of(model_uri: str) -> PictureFamily:
    """Returns the family of a model by its location, the default one if the name tells none."""
    return next((family for pattern, family in _NAMES if pattern.search(model_uri)), DEFAULT_FAMILY)


class Pictures(NamedTuple):
    """The pictures of a request: the sizes of those that were measured, and the number of others."""

    sizes: tuple[tuple[int, int], ...] = ()
    others: int = 0

    def tokens(self, rule: PictureRule) -> int:
        """Returns the tokens of all pictures for a model with this rule."""
        return sum(rule.tokens(*size) for size in self.sizes) + self.others * rule.tokens(*UNKNOWN_SIZE)


class _Scaling(NamedTuple):
    """Qwen-VL's: both sides are rounded to whole patches, and the area is kept between two bounds."""

    patch: int
    least_pixels: int
    most_pixels: int

    def tokens(self, width: int, height: int) -> int:
        width, height = min(width, MAX_SIDES * height), min(height, MAX_SIDES * width)
        patches = round(width / self.patch) * round(height / self.patch)
        if patches * self.patch**2 > self.most_pixels:
            scale = math.sqrt(self.most_pixels / (width * height)) / self.patch
            return max(1, math.floor(width * scale)) * max(1, math.floor(height * scale))
        if patches * self.patch**2 < self.least_pixels:
            scale = math.sqrt(self.least_pixels / (width * height)) / self.patch
            return math.ceil(width * scale) * math.ceil(height * scale)
        return patches


_SCALINGS: Final = {
    PictureFamily.QWEN_28: _Scaling(28, 56 * 56, 16_384 * 28 * 28),
    PictureFamily.QWEN_32: _Scaling(32, 256 * 256, 16_384 * 32 * 32),
}


def _pixtral(patch: int, longest: int) -> Callable[[int, int], int]:
    """Patches of a picture that is scaled down to its longest side, and one token at the end of each row."""

    def tokens(width: int, height: int) -> int:
        scale = min(1.0, longest / max(width, height))
        columns, rows = math.ceil(width * scale / patch), math.ceil(height * scale / patch)
        return columns * rows + rows

    return tokens


def _gemma(width: int, height: int) -> int:
    return 256  # without pan and scan, every picture is 896 x 896


def _tiles(width: int, height: int, side: int, most: int) -> list[tuple[float, int]]:
    """Returns, for each grid of at most so many square tiles, the scale at which a picture fits it, and its tiles."""
    return [
        (min(columns * side / width, rows * side / height), columns * rows)
        for columns in range(1, most + 1)
        for rows in range(1, most // columns + 1)
    ]


@lru_cache(maxsize=4096)
def _llama(width: int, height: int) -> int:
    """144 tokens for each tile of 336 x 336, and for the whole picture if it has several.

    The grid is the one that enlarges the picture least, else shrinks it least; of equal ones the smallest.
    """
    grids = _tiles(width, height, 336, 16)
    enlarging = [scale for scale, _ in grids if scale >= 1.0]
    chosen = min(enlarging) if enlarging else max(scale for scale, _ in grids)
    tiles = min(tiles for scale, tiles in grids if scale == chosen)
    return 144 * (tiles + (tiles > 1))


@lru_cache(maxsize=4096)
def _internvl(width: int, height: int) -> int:
    """256 tokens for each tile of 448 x 448, and for the whole picture if it has several.

    The grid of at most 12 tiles has the closest ratio of sides. Of equal ones it is the largest that the picture fills
    by more than half.
    """
    grids = sorted((columns * rows, columns, rows) for columns in range(1, 13) for rows in range(1, 12 // columns + 1))
    best, chosen = math.inf, 1
    for tiles, columns, rows in grids:
        difference = abs(width / height - columns / rows)
        if difference < best or (difference == best and width * height > 0.5 * 448 * 448 * tiles):
            best, chosen = difference, tiles
    return 256 * (chosen + (chosen > 1))


_RULES: Final[dict[PictureFamily, Callable[[int, int], int]]] = {
    PictureFamily.GEMMA: _gemma,
    PictureFamily.LLAMA: _llama,
    PictureFamily.INTERNVL: _internvl,
    PictureFamily.PIXTRAL: _pixtral(16, 1024),
    PictureFamily.MISTRAL: _pixtral(28, 1540),
}
