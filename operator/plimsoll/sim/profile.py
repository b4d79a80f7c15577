"""What one replica's hardware does with one model: the coefficients of a step and the engine's limits, from JSON.

The files are those of the light engine (`engine-image/simulated/profiles`), so that a simulation and a fleet of light
engines have the same plant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, cast

from plimsoll.sim.errors import BadInput

_COUNTS: Final = {
    "kv_tokens": 720_000,
    "max_num_seqs": 256,
    "budget": 8_192,
    "block_size": 16,
    "layers": 32,
    "max_model_len": 40_960,
    "kv_bytes_per_token": 131_072,
}
_TIMES: Final = ("hinge_dec", "frontend", "frontend_token")
_FACTORS: Final = ("producer_factor", "consumer_factor")


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds of a step that prefills p tokens, decodes b sequences and reads k cached tokens:

    base + anypre [p > 0] + pretok p + preattn sum n (ctx + n / 2) + dec b + ctx k.
    """

    base: float
    anypre: float
    pretok: float
    preattn: float
    dec: float
    ctx: float

    def scaled(self, factor: float) -> Coefficients:
        return Coefficients(*(factor * getattr(self, field.name) for field in fields(self)))

    def towards(self, other: Coefficients, share: float) -> Coefficients:
        """This at share 0, the other at share 1, on the same line beyond it."""
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return Coefficients(*((1 - share) * own + share * others for own, others in pairs))


@dataclass(frozen=True, slots=True)
class Profile:
    """One replica. Times in seconds, see `Coefficients`.

    hot: the coefficients while the card is power-capped, None where it never is. From `hinge_sequences` on each
    sequence costs `hinge_dec` more. producer_factor, consumer_factor: steps of an engine that only prefills or only
    decodes, over the law's. frontend, frontend_token: a request's way to the engine core, HTTP and parsing.
    """

    coefficients: Coefficients
    kv_tokens: int
    max_num_seqs: int
    budget: int
    block_size: int
    layers: int
    max_model_len: int
    kv_bytes_per_token: int
    hot: Coefficients | None = None
    hinge_sequences: int = 0
    hinge_dec: float = 0.0
    producer_factor: float = 1.0
    consumer_factor: float = 1.0
    frontend: float = 0.0
    frontend_token: float = 0.0
    accelerator: str = "simulated"

    def scaled(self, factor: float) -> Profile:
        """A machine on which every step takes `factor` times as long."""
        return replace(
            self,
            coefficients=self.coefficients.scaled(factor),
            hot=None if self.hot is None else self.hot.scaled(factor),
            hinge_dec=self.hinge_dec * factor,
        )


def load(name: str) -> Profile:
    """The built-in profile of that name, or the one in a file whose name ends in .json. Raises BadInput."""
    folder = files("plimsoll.sim").joinpath("profiles")
    known = sorted(one.name.removesuffix(".json") for one in folder.iterdir() if one.name.endswith(".json"))
    if not name.endswith(".json") and name not in known:
        raise BadInput(f"no hardware profile {name!r}: known are {', '.join(known)}, or the path of a .json file")
    try:
        text = Path(name).read_text() if name.endswith(".json") else folder.joinpath(f"{name}.json").read_text()
        return parse(json.loads(text))
    except OSError as error:
        raise BadInput(f"{name}: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"{name}: not JSON: {error}") from None
    except BadInput as error:
        raise BadInput(f"{name}: {error}") from None


def parse(document: Any) -> Profile:
    """A profile from its JSON document; every key but the six coefficients has a default. Raises BadInput."""
    if not isinstance(document, dict):
        raise BadInput("a profile is a JSON object")
    known = {field.name for field in fields(Coefficients)} | set(_COUNTS) | set(_TIMES) | set(_FACTORS)
    if unknown := set(document) - known - {"hot", "hinge_sequences", "accelerator"}:
        raise BadInput(f"unknown key: {', '.join(sorted(unknown))}")
    counts = {key: _count(document, key, default) for key, default in _COUNTS.items()}
    if counts["max_num_seqs"] > counts["budget"]:
        raise BadInput("max_num_seqs is above budget: a step could not give each sequence its token")
    hot = document.get("hot")
    return Profile(
        coefficients=_coefficients(document),
        hot=None if hot is None else _coefficients(hot),
        hinge_sequences=_count(document, "hinge_sequences", 0, least=0),
        accelerator=str(document.get("accelerator", "simulated")),
        **counts,
        **cast(Any, {key: _number(document, key, 0.0) for key in _TIMES}),
        **cast(Any, {key: _number(document, key, 1.0, least=math.ulp(0.0)) for key in _FACTORS}),
    )


def _coefficients(document: Any) -> Coefficients:
    if not isinstance(document, dict):
        raise BadInput("hot must be an object of the six coefficients")
    base = _number(document, "base", None, least=math.ulp(0.0))
    anypre = _number(document, "anypre", None, least=-base)
    return Coefficients(base, anypre, *(_number(document, key, None) for key in ("pretok", "preattn", "dec", "ctx")))


def _number(document: Mapping[str, Any], key: str, default: float | None, least: float = 0.0) -> float:
    value = document.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise BadInput(f"{key} must be a number of at least {least:g}, not {value!r}")
    return float(value)


def _count(document: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    value = document.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadInput(f"{key} must be a whole number of at least {least}, not {value!r}")
    return value
