"""The model names in a service's status, and how long a name that the spec has dropped stays accepted.

Problem: clients learn a new name later than the cluster, and gateways do not all learn it at the same time.
Idea: a new name is listed once every gateway accepts it. A dropped name stays listed for an hour, and until every
gateway accepts the new one. Gateways accept the listed names. Another service that claims a dropped name gets it at
once.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from plimsoll.core.routing.model_names import published

Object = Mapping[str, Any]

FORMER_SECONDS = 3600.0
MOST_FORMER = 6  # names; the status lists eight in all
_TIME = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Former:
    """A name that the spec has dropped. until: when it stops being accepted, RFC 3339 in UTC."""

    name: str
    until: str

    def __str__(self) -> str:
        """The entry of `status.formerNames`, such as `chat until 2026-01-01T00:00:00Z`."""
        return f"{self.name} until {self.until}"


@dataclass(frozen=True)
class ModelNames:
    """The names in the status. pending: the new name while some gateway does not accept it, else "".

    next_s: seconds until the next former name expires, None if there is none.
    """

    listed: tuple[str, ...] = ()
    former: tuple[Former, ...] = ()
    pending: str = ""
    next_s: float | None = None


def model_names(
    raw: Object,
    claimed: str,
    owned: Set[str],
    answered: Set[str] | None,
    gateways_complete: bool,
    now: datetime,
) -> ModelNames:
    """The names of an InferenceService.

    claimed: the name in its spec. owned: the names that the service owns. answered: names that all
    gateways accept for this service, None if none reports them. gateways_complete: every gateway replica has answered.
    """
    meta = raw["metadata"]
    long_name = f"{meta['namespace']}/{meta['name']}"
    before = published(raw)
    own = claimed if claimed in owned else ""
    pending = own if answered is not None and own not in {*before, *answered} else ""
    listed = [name for name in (own, long_name) if name in owned and name != pending]
    dropped = [name for name in before if name not in (own, long_name) and name in owned]
    settled = gateways_complete and (answered is None or not own or own in answered)
    former = _former(raw, dropped, settled, now)
    return ModelNames(
        tuple(dict.fromkeys((*listed, *(one.name for one in former)))), former, pending, _next_s(former, now)
    )


def _former(raw: Object, dropped: list[str], settled: bool, now: datetime) -> tuple[Former, ...]:
    """Dropped names that are still accepted, most recently dropped first."""
    known = _known(raw)
    end = (now + timedelta(seconds=FORMER_SECONDS)).strftime(_TIME)
    found = [Former(name, known.get(name, end)) for name in dropped]
    lasting = [one for one in found if not settled or one.until > now.strftime(_TIME)]
    return tuple(sorted(lasting, key=lambda one: one.until, reverse=True)[:MOST_FORMER])


def _known(raw: Object) -> dict[str, str]:
    """The expiry of each former name in the status; entries that cannot be parsed are left out."""
    listed = (raw.get("status") or {}).get("formerNames") or ()
    found = {}
    for entry in listed:
        try:
            name, _, until = entry.rpartition(" until ")
            found[str(name)] = datetime.strptime(until, _TIME).strftime(_TIME)
        except (AttributeError, TypeError, ValueError):
            continue
    return found


def _next_s(former: tuple[Former, ...], now: datetime) -> float | None:
    if not former:
        return None
    left = datetime.strptime(former[-1].until, _TIME).replace(tzinfo=now.tzinfo) - now
    return max(1.0, left.total_seconds() + 1.0)
