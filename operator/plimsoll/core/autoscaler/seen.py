"""What a tick is given of one service: what is heard, what runs, and what the user wants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.core.admission import ClassPolicy
from plimsoll.core.lifecycle import Starting
from plimsoll.core.ports import About
from plimsoll.core.scaling import Policy
from plimsoll.core.signals import Heard
from plimsoll.core.slo import Slo
from plimsoll.core.variants import UNKNOWN, Variant


@dataclass(frozen=True, slots=True)
class TierSeen:
    """One tier as the cluster shows it. replicas: ordered. about: of an engine that has told, None before any has.
    variant: what is ordered now."""

    replicas: int
    ready: int
    starting: tuple[Starting, ...] = ()
    about: About | None = None
    variant: Variant = UNKNOWN


@dataclass(frozen=True, slots=True)
class Seen:
    """One service at one moment. tiers: those that have been made."""

    heard: Heard
    tiers: Mapping[str, TierSeen]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user wants of a service.

    slo: None where nothing is promised; then nothing is sized. headroom: share of the load line kept free. horizon_s:
    how far to look ahead, None for the learned start-up time. classes: of requests, by which gateways let in.
    """

    policy: Policy
    slo: Slo | None
    headroom: float = 0.0
    horizon_s: float | None = None
    classes: tuple[ClassPolicy, ...] = ()

    @property
    def promised(self) -> tuple[Slo, ...]:
        """Of each class of requests, or the one of all; none where nothing is promised."""
        whole = () if self.slo is None else (self.slo,)
        return tuple(one.slo for one in self.classes) or whole
