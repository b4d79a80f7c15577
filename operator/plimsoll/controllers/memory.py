"""What a service's status keeps over restarts: what an autoscaler has learned, and what it decided of late.

What was learned is compressed: it is for this program alone, and the status of a thousand services is held in memory by
everybody who watches them. The decisions are those that people read there; the steps behind them are not kept.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import orjson

from plimsoll.core.autoscaler.service import Service, Told
from plimsoll.core.autoscaler.stored import restore as autoscaler_restore
from plimsoll.core.autoscaler.stored import to_dict as autoscaler_to_dict
from plimsoll.core.scaling import Decision, State, Step, TierDecision

FORM = "zlib"
LIMIT = 1 << 20  # bytes of what is read; a hand-made text could unfold to anything


def write(service: Service) -> dict[str, str]:
    """About 4 KB a tier once there is history."""
    return {FORM: base64.b64encode(zlib.compress(orjson.dumps(autoscaler_to_dict(service)), 9)).decode()}


def recall(service: Service, kept: object) -> None:
    """Put back what `write` gave; whatever else it may be, the service begins anew."""
    text = kept.get(FORM) if isinstance(kept, Mapping) else None
    if not isinstance(text, str):
        return
    try:
        unfolded = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), LIMIT)
        autoscaler_restore(service, orjson.loads(unfolded))
    except (binascii.Error, zlib.error, ValueError):
        return


def retell(service: Service, status: Mapping[str, Any]) -> None:
    """Put back the decisions that a status shows; one that cannot be read is left out."""
    before = status.get("decisions")
    shown = [status.get("lastDecision"), *(before if isinstance(before, Sequence) else ())]
    service.decisions.extend(told for one in reversed(shown) if (told := _told(one)) is not None)


def _told(shown: object) -> Told | None:
    if not isinstance(shown, Mapping):
        return None
    try:
        at_s = datetime.fromisoformat(shown["time"]).timestamp()
        tiers = {str(name): _tier(tier) for name, tier in shown["tiers"].items()}
        return Told(at_s, Decision(tiers, shown.get("binding"), State()))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None


def _tier(shown: Mapping[str, Any]) -> TierDecision:
    before, after = int(shown["from"]), int(shown["to"])
    return TierDecision(after, (Step("told", after, "{}", (str(shown["why"]),)),), before, after)
