"""The operator's tick over one service: the real core, fed with what the operator would have heard by now.

As `plimsoll.controllers.autoscale` feeds it, without a cluster: readings of gateways and engines into the listener,
ended starts into the ledger, one `decide_all` a second, and what the gatekeeper then tells. Who goes when a tier
shrinks is ranked by what each gateway and each engine said last, however old that is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.core.admission.published import Published
from plimsoll.core.autoscaler import Seen, TierSeen, Wish
from plimsoll.core.autoscaler.fleet import decide_all
from plimsoll.core.autoscaler.gatekeeper import Gatekeeper
from plimsoll.core.autoscaler.service import Service
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import EngineReading, ServiceReading
from plimsoll.core.scaling import Decision
from plimsoll.core.scaling.leaving import Load, load
from plimsoll.core.signals import Listener

TICK_S: Final = 1.0
POLL_S: Final = 1.0  # between two looks at a gateway
BUSY_S: Final = 5.0  # at an engine
IDLE_S: Final = 10.0
DEFAULT_SHARE: Final = 0.95  # where a service promises nothing, percentiles are still looked at
_KEY: Final = "service"


class Operator:
    """All times are seconds since the epoch."""

    def __init__(self, service: InferenceService) -> None:
        roles = [name for name, _ in service.spec.tiers.items()]
        self._spec = service
        self._listener = Listener([Role(name) for name in roles])
        self._gatekeeper = Gatekeeper()
        self._gateways: dict[str, ServiceReading] = {}
        self._running: dict[str, float] = {}
        self.service = Service.of(roles)

    @property
    def told(self) -> Published | None:
        """What gateways are told."""
        return self._gatekeeper.told

    def hear_engine(self, role: Role, reading: EngineReading) -> None:
        self._listener.hear_engine(role, reading)
        if reading.running is not None:
            self._running[reading.pod] = reading.running + (reading.waiting or 0.0)

    def hear_gateway(self, gateway: str, at_s: float, reading: ServiceReading) -> None:
        self._listener.hear_gateway(gateway, gateway, at_s, reading)
        self._gatekeeper.sharing.hear(gateway, gateway, at_s, reading)
        self._gateways[gateway] = reading

    def load(self, pod: str) -> Load:
        """What is known of the requests at an engine."""
        return load(self._gateways.values(), pod, self._running.get(pod))

    def started(self, tier: str, took_s: Sequence[tuple[str, float]]) -> None:
        """An engine has become ready; its phases in order with their seconds."""
        self.service.started(tier, took_s)

    def tick(
        self,
        now_s: float,
        tiers: Mapping[str, TierSeen],
        ready: Mapping[Role, Collection[str]],
        gateways: Sequence[str],
    ) -> Decision:
        """One pass. ready: names of the engines that are, by tier."""
        spec = self._spec.spec
        slo = None if spec.slo is None else spec.slo.to_core()
        wish = Wish(
            self._spec.policy(now_s), slo, spec.scaling.headroom_share, spec.scaling.horizon_s, self._spec.classes
        )
        share = DEFAULT_SHARE if slo is None else slo.share
        seen = Seen(self._listener.heard(now_s, ready, gateways, share), tiers)
        decision = decide_all({_KEY: (self.service, seen, wish)}, now_s)[_KEY]
        self._gatekeeper.tell(self.service, seen, wish, gateways, now_s)
        return decision
