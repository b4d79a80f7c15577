"""What a simulated accelerator with a model on it can do: coefficients of a step and limits, from a JSON file.

Problem: an engine must stand in for a card and a model that were measured, or for one that somebody wants to try.
Idea: a file of numbers. Those that come with the package lie in `profiles/` and show the form.

The engine simulator's image copies this module and its files, so it imports nothing but the standard library.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

PROFILE_FOLDER: Final = Path(__file__).parent / "profiles"


class ProfileError(ValueError):
    """A profile cannot be found or does not make sense; the message names the key."""


@dataclass(frozen=True)
class StepCoefficients:
    """Seconds of a step, linear in what it does.

    base + anypre [any prefill] + pretok p + preattn sum n (ctx + n / 2) + dec b + ctx k, for p prefilled tokens, b
    decoding sequences and k cached tokens that these read.
    """

    base: float
    anypre: float
    pretok: float
    preattn: float
    dec: float
    ctx: float

    def scaled(self, factor: float) -> StepCoefficients:
        """All of them times a factor."""
        return StepCoefficients(*(getattr(self, field.name) * factor for field in fields(self)))

    def interpolate(self, other: StepCoefficients, share: float) -> StepCoefficients:
        """A mixture: this at share 0, the other at share 1, on the same line beyond it."""
        return StepCoefficients(
            *((1 - share) * getattr(self, field.name) + share * getattr(other, field.name) for field in fields(self))
        )


@dataclass(frozen=True)
class HardwareProfile:
    """One replica. Times in seconds.

    hot: the coefficients while the card is power-capped, None where it never is; cool_share, hot_share: shares of its
    time in matrix products up to which it is cool, and at which it is hot. In a step of more than `hinge_sequences`
    tokens each sequence beyond costs `hinge_dec` more. `producer_factor` and `consumer_factor`: steps of an engine that
    only prefills or only decodes, over the law's. `frontend` and `frontend_token`: a request's way to the engine core,
    HTTP and parsing. `accelerator`: its name, as the driver of the real one has it. `mixture`: whether the model is one
    of experts, which changes no step here.
    """

    coefficients: StepCoefficients
    kv_tokens: int
    max_num_seqs: int
    budget: int
    block_size: int
    layers: int
    max_model_len: int
    kv_bytes_per_token: int
    hot: StepCoefficients | None = None
    hinge_sequences: int = 0
    hinge_dec: float = 0.0
    cool_share: float = 0.25
    hot_share: float = 0.5
    producer_factor: float = 1.0
    consumer_factor: float = 1.0
    frontend: float = 0.0
    frontend_token: float = 0.0
    accelerator: str = "simulated"
    mixture: bool = False

    def scaled(self, factor: float) -> HardwareProfile:
        """A machine on which every step takes `factor` times as long."""
        return replace(
            self,
            coefficients=self.coefficients.scaled(factor),
            hot=self.hot and self.hot.scaled(factor),
            hinge_dec=self.hinge_dec * factor,
        )


_COUNT_DEFAULTS: Final = {
    "kv_tokens": 720_000,
    "max_num_seqs": 256,
    "budget": 8_192,
    "block_size": 16,
    "layers": 32,
    "max_model_len": 40_960,
    "kv_bytes_per_token": 131_072,
}
_TIME_KEYS: Final = ("hinge_dec", "frontend", "frontend_token")
_FACTOR_KEYS: Final = ("producer_factor", "consumer_factor")
_SHARE_DEFAULTS: Final = {"cool_share": 0.25, "hot_share": 0.5}


def load(name: str) -> HardwareProfile:
    """The profile of that name that comes with the package, or the one in a file; raises ProfileError."""
    path = Path(name) if name.endswith(".json") else PROFILE_FOLDER / f"{name}.json"
    try:
        return parse(read(path))
    except OSError as error:
        if name.endswith(".json"):
            raise ProfileError(f"{name}: {error.strerror}") from None
        known = ", ".join(sorted(one.stem for one in PROFILE_FOLDER.glob("*.json")))
        raise ProfileError(f"no hardware profile {name!r}: known are {known}, or the path of a .json file") from None


def read(path: Path) -> Any:
    """A JSON document from a file that nobody vouches for. Raises OSError, and ProfileError that names the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_int=_parse_int)
    except RecursionError:
        raise ProfileError(f"{path}: not JSON: too deep") from None
    except ValueError as error:
        raise ProfileError(f"{path}: not JSON: {error}") from None


def _parse_int(digits: str) -> int:
    if len(digits) > sys.float_info.max_10_exp:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def parse(document: Any) -> HardwareProfile:
    """A profile from its JSON document; every key but the six coefficients has a default. Raises ProfileError."""
    if not isinstance(document, dict):
        raise ProfileError("a profile is a JSON object")
    known = (
        {field.name for field in fields(StepCoefficients)}
        | set(_COUNT_DEFAULTS)
        | set(_TIME_KEYS)
        | set(_FACTOR_KEYS)
        | set(_SHARE_DEFAULTS)
    )
    if unknown := set(document) - known - {"hot", "hinge_sequences", "accelerator", "mixture"}:
        raise ProfileError(f"unknown key: {', '.join(sorted(unknown))}")
    hot = document.get("hot")
    accelerator = document.get("accelerator", HardwareProfile.accelerator)
    if not isinstance(accelerator, str):
        raise ProfileError(f"accelerator must be a name, not {accelerator!r}")
    mixture = document.get("mixture", HardwareProfile.mixture)
    if not isinstance(mixture, bool):
        raise ProfileError(f"mixture must be true or false, not {mixture!r}")
    counts = {key: _count(document, key, default) for key, default in _COUNT_DEFAULTS.items()}
    if counts["max_num_seqs"] > counts["budget"]:
        raise ProfileError("max_num_seqs is above budget: a step could not give each sequence its token")
    times = {key: _number(document, key, 0.0) for key in _TIME_KEYS}
    factors = {key: _number(document, key, 1.0, minimum=math.ulp(0.0)) for key in _FACTOR_KEYS}
    shares = {key: _number(document, key, default) for key, default in _SHARE_DEFAULTS.items()}
    if not shares["cool_share"] < shares["hot_share"]:
        raise ProfileError("hot_share must be above cool_share")
    return HardwareProfile(
        coefficients=_coefficients(document),
        hot=None if hot is None else _coefficients(hot),
        hinge_sequences=_count(document, "hinge_sequences", 0, minimum=0),
        producer_factor=factors["producer_factor"],
        consumer_factor=factors["consumer_factor"],
        accelerator=accelerator,
        mixture=mixture,
        hinge_dec=times["hinge_dec"],
        frontend=times["frontend"],
        frontend_token=times["frontend_token"],
        cool_share=shares["cool_share"],
        hot_share=shares["hot_share"],
        **counts,
    )


def _coefficients(document: Any) -> StepCoefficients:
    if not isinstance(document, dict):
        raise ProfileError("hot must be an object of the six coefficients")
    base = _number(document, "base", None, minimum=math.ulp(0.0))
    anypre = _number(document, "anypre", None, minimum=-base)
    return StepCoefficients(
        base, anypre, *(_number(document, key, None) for key in ("pretok", "preattn", "dec", "ctx"))
    )


def _number(document: Mapping[str, Any], key: str, default: float | None, minimum: float = 0.0) -> float:
    value = document.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= sys.float_info.max:
        bound = "above 0" if minimum == math.ulp(0.0) else f"of at least {minimum}"
        raise ProfileError(f"{key} must be a number {bound}, not {value!r}")
    return float(value)


def _count(document: Mapping[str, Any], key: str, default: int, minimum: int = 1) -> int:
    value = document.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ProfileError(f"{key} must be a whole number of at least {minimum}, not {value!r}")
    return value
