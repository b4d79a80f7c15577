"""From what is heard of all services to a decision for each: the whole law of a tick, and what it remembers. Pure."""

from plimsoll.core.autoscaler.fleet import decide_all
from plimsoll.core.autoscaler.seen import Seen, TierSeen, Wish
from plimsoll.core.autoscaler.service import Service
from plimsoll.core.autoscaler.stored import restore, to_dict
from plimsoll.core.autoscaler.tier import Tier

__all__ = ["Seen", "Service", "Tier", "TierSeen", "Wish", "decide_all", "restore", "to_dict"]
