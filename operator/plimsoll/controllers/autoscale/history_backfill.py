"""Backfills the forecast of a service without history from a metrics store.

Problem: the query and the replay take seconds. No tick and no service may wait for them or fail because of them.

Idea: one service at a time is backfilled in a thread, once its cost per request is known. The result is merged with the
samples taken in the meantime. A failure is logged once, and the query is not repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from plimsoll.controllers.object_cache import Key
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.sizing_batch import TierCapacity
from plimsoll.core.demand.backfill import has_history, replay_history, with_history
from plimsoll.core.demand.demand_state import DemandState
from plimsoll.core.errors import BackendUnavailable
from plimsoll.core.ports import MetricsHistory
from plimsoll.telemetry.service_log import ServiceLog

log = ServiceLog(__name__)

HISTORY_SPAN_S: Final = 14 * 86400.0  # two weeks, as the weekly seasonality requires


class HistoryBackfill:
    """Tracks the services that still need their history."""

    def __init__(self, history: MetricsHistory | None) -> None:
        """history: None if no metrics store is configured; then nothing is backfilled."""
        self._history = history
        self._pending: set[Key] = set()
        self._task: asyncio.Task[None] | None = None

    def track(self, key: Key, service_state: ServiceState) -> None:
        """Add a service that is new to this process, after its checkpoint has been restored."""
        if self._history is not None and not any(
            has_history(tier.forecast_state) for tier in service_state.tiers.values()
        ):
            self._pending.add(key)

    def start_next(self, services: Mapping[Key, ServiceState], now_s: float) -> None:
        """Start the backfill of the next service that is ready for it, unless one is running."""
        self._pending &= services.keys()
        if self._history is None or (self._task is not None and not self._task.done()):
            return
        next_key = next((key for key in self._pending if _is_ready(services[key])), None)
        if next_key is not None:
            self._pending.discard(next_key)
            self._task = asyncio.create_task(backfill(self._history, next_key, services[next_key], now_s))


def _is_ready(service_state: ServiceState) -> bool:
    return all(
        isinstance(tier.capacity, TierCapacity) and tier.forecast_state.last_sample_s is not None
        for tier in service_state.tiers.values()
    )


async def backfill(history: MetricsHistory, key: Key, service_state: ServiceState, now_s: float) -> None:
    """Backfill the forecasts of one service. A failure is logged and leaves them unchanged."""
    request_gpu_s = {
        role: tier.capacity.request_gpu_s
        for role, tier in service_state.tiers.items()
        if isinstance(tier.capacity, TierCapacity)
    }
    try:
        histories = await asyncio.to_thread(_replay_history, history, "/".join(key), request_gpu_s, now_s)
    except BackendUnavailable as error:
        log.warning(key, "request history is not available", error=str(error))
        return
    except Exception:  # the task is not awaited, so nothing else would report it
        log.exception(key, "request history cannot be replayed")
        return
    for role, (minutes, past_state) in histories.items():
        tier = service_state.tiers[role]
        tier.forecast_state = with_history(tier.forecast_state, past_state)
        log.info(key, "request history loaded", tier=role, minutes=minutes)


def _replay_history(
    history: MetricsHistory, name: str, request_gpu_s: Mapping[str, float], now_s: float
) -> dict[str, tuple[int, DemandState]]:
    """By tier: the number of known minutes and the demand state after them; empty if none is known."""
    minutes = history.request_rate(name, now_s - HISTORY_SPAN_S, now_s)
    return (
        {role: (len(minutes), replay_history(minutes, gpu_s)) for role, gpu_s in request_gpu_s.items()}
        if minutes
        else {}
    )
