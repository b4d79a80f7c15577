"""Autoscaler state that survives a restart: the learned state as compressed text, and the decisions in the status.

The decisions are the ones that the status shows; their individual steps are not stored.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import orjson

from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.scaling_decision import DecisionStep, ScalingDecision, TierDecision
from plimsoll.core.autoscaling.service_state import ServiceState, TimedDecision
from plimsoll.core.autoscaling.state_checkpoint import dump_service_state as autoscaler_to_dict
from plimsoll.core.autoscaling.state_checkpoint import restore_service_state as autoscaler_restore

MAX_DECODED_BYTES = 1 << 20  # limit against a crafted checkpoint that expands without bound


def encode(service_state: ServiceState) -> str:
    """The learned state, compressed and base64-encoded: about 4 KB per tier with full history."""
    return base64.b64encode(zlib.compress(orjson.dumps(autoscaler_to_dict(service_state)), 9)).decode()


def restore(service_state: ServiceState, checkpoint: str) -> None:
    """Restore the output of `encode`. Anything else is ignored, and the service starts without learned state."""
    try:
        decoded = zlib.decompressobj().decompress(base64.b64decode(checkpoint, validate=True), MAX_DECODED_BYTES)
        autoscaler_restore(service_state, orjson.loads(decoded))
    except (binascii.Error, zlib.error, ValueError):
        return


def restore_decisions(service_state: ServiceState, status: Mapping[str, Any]) -> None:
    """Restore the decisions in a status; decisions that cannot be parsed are skipped."""
    past_decisions = status.get("decisions")
    stored = [status.get("lastDecision"), *(past_decisions if isinstance(past_decisions, Sequence) else ())]
    service_state.decisions.extend(
        decision for one in reversed(stored) if (decision := _timed_decision(one)) is not None
    )


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
        (DecisionStep("told", replicas_after, "{}", (str(stored["why"]),)),),
        replicas_before,
        replicas_after,
    )
