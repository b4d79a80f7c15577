"""From raw readings of gateways and engines to what a scaling decision needs. Pure."""

from plimsoll.core.signals.heard import Heard, TierHeard
from plimsoll.core.signals.listener import Listener

__all__ = ["Heard", "Listener", "TierHeard"]
