"""What a simulation refuses before it begins."""

from __future__ import annotations

from plimsoll.core.errors import PlimsollError


class BadInput(PlimsollError):
    """A trace, a profile, a policy or another word of the user's cannot be used; the message names the place."""
