"""Errors in the input of a simulation, raised before it begins."""

from __future__ import annotations

from plimsoll.core.errors import PlimsollError


class BadInput(PlimsollError):
    """A trace, a profile, a policy or another user input is invalid; the message names the place."""
