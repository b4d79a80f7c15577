"""Hardware profile of one replica with one model: step coefficients and engine limits, from JSON.

The engine simulator of `engine-image` reads the same module and files (`profiles`), so a simulation and a fleet of
simulated engines have the same plant. Here an invalid profile is invalid user input.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plimsoll.sim import profiles
from plimsoll.sim.errors import BadInput
from plimsoll.sim.profiles import HardwareProfile, ProfileError, StepCoefficients

__all__ = ["HardwareProfile", "StepCoefficients", "document", "load", "parse"]


def load(name: str) -> HardwareProfile:
    """Return the built-in profile of that name, or the one in a file whose name ends in .json. Raises BadInput."""
    try:
        return profiles.load(name)
    except ProfileError as error:
        message = str(error)
        raise BadInput(message if name in message else f"{name}: {message}") from None


def document(path: str) -> Any:
    """Return the content of a user's JSON file. Raises BadInput that names the file."""
    try:
        return profiles.read(Path(path))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except ProfileError as error:
        raise BadInput(str(error)) from None


def parse(document: Any) -> HardwareProfile:
    """Return a profile from its JSON document; every key but the six coefficients has a default. Raises BadInput."""
    try:
        return profiles.parse(document)
    except ProfileError as error:
        raise BadInput(str(error)) from None
