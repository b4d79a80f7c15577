"""What was spent of quotas and of keys' limits goes to the gateway that counts it next.

Problem: the owner of a service or a key changes whenever a gateway comes or goes. A new owner with full buckets would
grant each tenant one more burst, so an autoscaler of gateways would raise every quota.

Idea: a gateway gives up the buckets of all that it does not own. What is missing in them is sent to the owner, which
takes it from its own buckets, even below zero: the sum is that of one gateway. While it waits for a connection, it
becomes less, as a bucket is refilled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from plimsoll.core.admission.token_bucket import Spent, per_second
from plimsoll.core.units import MINUTE_S
from plimsoll.gateway.identity import Identity
from plimsoll.gateway.one_queue import messages
from plimsoll.gateway.one_queue.owner_link import OwnerLink
from plimsoll.gateway.one_queue.ownership import Ownership
from plimsoll.gateway.picker import Picker

WAIT_SECONDS: Final = MINUTE_S  # the larger burst, that of a key's limits


class SpentLimits:
    """What this gateway has counted and others own, until they have it. Times are monotonic seconds."""

    def __init__(self, picker: Picker, ownership: Ownership) -> None:
        self._picker = picker
        self._ownership = ownership
        self._waiting: list[tuple[float, messages.SpentLimit]] = []  # as many as there were buckets in WAIT_SECONDS

    def collect(self, now: float, owner: str = "") -> None:
        """Give up the buckets of what another gateway owns: this `owner`, or any. Take back what is owned here."""
        kept = [(since_s, spent) for since_s, spent in self._waiting if now - since_s < WAIT_SECONDS]
        own = self._ownership.own_name
        self._waiting = [(since_s, spent) for since_s, spent in kept if self._owner(spent) != own]
        for since_s, spent in kept:
            if self._owner(spent) == own and (left := self._left(spent, now - since_s)) is not None:
                count(self._picker, left, now)
        self._waiting += [(now, spent) for spent in self._given_up(now, owner)]

    def hand_over(self, link: OwnerLink, now: float) -> None:
        """Send what the other gateway owns, if it can be reached and takes it."""
        if not (link.is_ready and link.takes_spent_limits):
            return
        found = [(since_s, spent) for since_s, spent in self._waiting if self._owner(spent) == link.name]
        self._waiting = [(since_s, spent) for since_s, spent in self._waiting if self._owner(spent) != link.name]
        own = [left for since_s, spent in found if (left := self._left(spent, now - since_s)) is not None]
        for start in range(0, len(own), messages.MAX_BATCH):
            link.send(messages.SpentLimits(own[start : start + messages.MAX_BATCH]))

    def _given_up(self, now: float, owner: str) -> Iterator[messages.SpentLimit]:
        picker, ownership = self._picker, self._ownership

        def is_moved(now_at: str) -> bool:
            return now_at == owner if owner else now_at != ownership.own_name

        for key in [key for key in picker.admission.services if is_moved(ownership.owner_of(key))]:
            for tenant, spent in picker.admission.take_spent_quotas(key, now).items():
                yield messages.SpentLimit(tenant, *spent, service=key)
        for identity, spent in picker.key_limits.take_spent(lambda name: is_moved(ownership.owner_of_key(name)), now):
            limits = identity.requests_per_minute, identity.tokens_per_minute
            yield messages.SpentLimit(identity.key_name, *spent, None, *limits)

    def _left(self, spent: messages.SpentLimit, waited_s: float) -> messages.SpentLimit | None:
        """Returns what is not refilled yet of what was spent before that time; None if all is."""
        if spent.service is None:
            rates = per_second(spent.requests_per_minute, MINUTE_S), per_second(spent.tokens_per_minute, MINUTE_S)
        else:
            rates = self._picker.admission.quota_rates(spent.service, spent.name)
        requests, tokens = (
            max(0.0, amount - waited_s * rate) if amount else 0.0
            for amount, rate in zip((spent.requests, spent.tokens), rates, strict=True)
        )
        return msgspec.structs.replace(spent, requests=requests, tokens=tokens) if requests or tokens else None

    def _owner(self, spent: messages.SpentLimit) -> str:
        if spent.service is None:
            return self._ownership.owner_of_key(spent.name)
        return self._ownership.owner_of(spent.service)


def count(picker: Picker, spent: messages.SpentLimit, now: float) -> None:
    """Count what another gateway has admitted."""
    amount = Spent(spent.requests, spent.tokens)
    if spent.service is not None:
        picker.admission.spend_quota(spent.service, spent.name, amount, now)
        return
    identity = Identity(
        spent.name, requests_per_minute=spent.requests_per_minute, tokens_per_minute=spent.tokens_per_minute
    )
    picker.key_limits.spend(identity, amount, now)
