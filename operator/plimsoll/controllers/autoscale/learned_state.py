"""Autoscaler state that survives a restart, as compressed text: what was learned, and the last decisions.

The steps of a decision are not stored.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from plimsoll.api.events import MAX_EVENT_MESSAGE_CHARS
from plimsoll.api.message_text import join_within
from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.scaling_decision import DecisionStep, ScalingDecision, TierDecision
from plimsoll.core.autoscaling.service_state import ServiceState, TimedDecision
from plimsoll.core.autoscaling.state_checkpoint import dump_service_state as autoscaler_to_dict
from plimsoll.core.autoscaling.state_checkpoint import restore_service_state as autoscaler_restore

_DECISIONS: Final = "decisions"
MAX_NUMBER: Final = 1e30  # no learned figure comes near it
MAX_DECODED_BYTES: Final = 1 << 20  # limit against a crafted checkpoint that expands without bound


def encode(service_state: ServiceState) -> str:
    """The learned state, compressed and base64-encoded: about 4 KB per tier with full history."""
    stored = autoscaler_to_dict(service_state) | {_DECISIONS: [*map(decision_to_dict, service_state.decisions)]}
    return base64.b64encode(zlib.compress(_dumps(stored), 9)).decode()


def _dumps(stored: Any) -> bytes:
    try:
        return orjson.dumps(stored)
    except TypeError:  # an integer of more than 64 bits
        return json.dumps(stored).encode()


def restore(service_state: ServiceState, checkpoint: str) -> None:
    """Restore the output of `encode`. Anything else is ignored, and the service starts without learned state."""
    try:
        decoded = zlib.decompressobj().decompress(base64.b64decode(checkpoint, validate=True), MAX_DECODED_BYTES)
        stored = orjson.loads(decoded)
        if not _is_moderate(stored):
            return
        decisions = stored.pop(_DECISIONS, ()) if isinstance(stored, dict) else ()
        autoscaler_restore(service_state, stored)
    except (binascii.Error, zlib.error, ValueError):
        return
    past_decisions = map(_timed_decision, decisions if isinstance(decisions, list) else ())
    service_state.decisions.extend(decision for decision in past_decisions if decision is not None)


def _is_moderate(stored: Any) -> bool:
    """Whether no number exceeds MAX_NUMBER: sums and squares of such a number overflow later."""
    pending = [stored]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            pending.extend(one.values())
        elif isinstance(one, list):
            pending.extend(one)
        elif isinstance(one, int | float) and abs(one) > MAX_NUMBER:
            return False
    return True


def decision_to_dict(timed_decision: TimedDecision) -> dict[str, Any]:
    """The tiers that a decision changed, and why; the form in a checkpoint."""
    decision = timed_decision.decision
    return {
        "time": datetime.fromtimestamp(timed_decision.at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "tiers": {
            name: {
                "from": tier.previous_replicas,
                "to": tier.recommended or 0,
                "reason": join_within(MAX_EVENT_MESSAGE_CHARS, *tier.brief_reasons),
            }
            for name, tier in decision.tiers.items()
            if tier.previous_replicas is not None and tier.previous_replicas != tier.recommended
        },
        **({"binding": decision.binding_tier} if decision.binding_tier else {}),
    }


def _timed_decision(stored: object) -> TimedDecision | None:
    if not isinstance(stored, Mapping):
        return None
    try:
        at_s = datetime.fromisoformat(stored["time"]).timestamp()
        tiers = {str(name): _tier_decision(tier) for name, tier in stored["tiers"].items()}
        return TimedDecision(at_s, ScalingDecision(tiers, stored.get("binding"), DecisionState()))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None


def _tier_decision(stored: Mapping[str, Any]) -> TierDecision:
    replicas_before, replicas_after = int(stored["from"]), int(stored["to"])
    return TierDecision(
        replicas_after,
        (DecisionStep("stored", replicas_after, "{}", (str(stored["reason"]),)),),
        replicas_before,
        replicas_after,
    )
