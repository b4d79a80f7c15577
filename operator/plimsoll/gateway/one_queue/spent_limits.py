"""What was spent of quotas and of keys' limits goes to the gateway that counts it next.

Problem: the owner of a service or a key changes whenever a gateway comes, goes or is killed. A new owner with full
buckets would grant each tenant one more burst, so an autoscaler of gateways would raise every quota.

Idea: a gateway gives up the buckets of all that it does not own. What is missing in them is sent to the owner, which
takes it from its own buckets, even below zero: the sum is that of one gateway. While it waits for a connection, it
becomes less, as a bucket is refilled.

A killed owner gives up nothing. So each owner sends copies of what it counts, at most each `COPY_SECONDS`, to the
gateway that owns next. That one counts them once it is the owner, or sends them to the owner's next process, which
has another `instance`. An owner that only left the list hands over as well: then its copies are not counted twice.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

from plimsoll.core.admission.token_bucket import Spent, per_second
from plimsoll.core.units import MINUTE_S
from plimsoll.gateway.identity import Identity
from plimsoll.gateway.one_queue import messages
from plimsoll.gateway.one_queue.owner_link import OwnerLink
from plimsoll.gateway.one_queue.ownership import Ownership
from plimsoll.gateway.picker import Picker

WAIT_SECONDS: Final = MINUTE_S  # for a service that is not known
COPY_SECONDS: Final = 0.05  # between two messages with copies; use of this time is lost with a killed owner
MAX_COPIES: Final = 20_000  # of one gateway, and as many limits that wait for their owner or their service


class _Copy(msgspec.Struct):
    """What an owner had counted at `since_s`. `is_counted`: here, since this gateway owns it now."""

    since_s: float
    spent: messages.SpentLimit
    is_counted: bool = False


class _Copies:
    """The copies from one process, the oldest first."""

    def __init__(self, instance: bytes) -> None:
        self.instance = instance
        self.by_limit: dict[tuple[str | None, str], _Copy] = {}


class SpentLimits:
    """What this gateway has counted and others own, until they have it, and the copies of what others count.

    Times are monotonic seconds.
    """

    def __init__(self, picker: Picker, ownership: Ownership, links: Mapping[str, OwnerLink]) -> None:
        self.instance = os.urandom(8)
        self._picker = picker
        self._ownership = ownership
        self._links = links
        self._waiting: list[tuple[float, messages.SpentLimit]] = []
        self._copies: dict[str, _Copies] = {}  # by the gateway that has sent them
        self._used_services: set[str] = set()  # since the last copies
        self._used_keys: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._copied_s = 0.0
        picker.admission.on_quota_use = self._on_quota_use
        picker.key_limits.on_use = self._on_key_use

    @property
    def is_waiting(self) -> bool:
        """Whether something waits for its owner, or for its service to be known here."""
        return bool(self._waiting)

    def close(self) -> None:
        """Send no more copies."""
        if self._timer is not None:
            self._timer.cancel()

    # ---------------------------------------------------------------- what others own

    def collect(self, now: float, owner: str = "") -> None:
        """Give up the buckets of what another gateway owns: this `owner`, or any. Take back what is owned here."""
        self.take_back(now)
        self._wait_for((now, spent) for spent in self._given_up(now, owner))
        self._count_copies(now)

    def take_back(self, now: float) -> None:
        """Count what is owned here of what waits."""
        found, self._waiting = self._waiting, []
        for since_s, spent in found:
            if self._owner(spent) == self._ownership.own_name and self._is_known(spent):
                self._spend(self._left(spent, now - since_s), now)
            elif not self._is_over(spent, now - since_s):
                self._waiting.append((since_s, spent))

    def hand_over(self, link: OwnerLink, now: float) -> None:
        """Send what the other gateway owns, if it can be reached and takes it."""
        if not (link.is_ready and link.takes_spent_limits):
            return
        found = [(since_s, spent) for since_s, spent in self._waiting if self._owner(spent) == link.name]
        self._waiting = [(since_s, spent) for since_s, spent in self._waiting if self._owner(spent) != link.name]
        own = [left for since_s, spent in found if (left := self._left(spent, now - since_s)) is not None]
        for batch in _batches(own):
            link.send(messages.SpentLimits(batch))

    def on_link_ready(self, link: OwnerLink, now: float) -> None:
        """Send what was decided here while this owner did not answer, and what its former process has counted."""
        copies = self._copies.get(link.name)
        if copies is not None and copies.instance != link.instance:
            self._give_back(link.name)
        self.collect(now, link.name)
        self.hand_over(link, now)
        self.copy_all([link], now)

    def count(self, gateway: str, spent: Iterable[messages.SpentLimit], now: float) -> None:
        """Count what another gateway has admitted."""
        for one in spent:
            copies = self._copies.get(gateway)
            copy = None if copies is None else copies.by_limit.pop((one.service, one.name), None)
            if copy is not None and copy.is_counted:
                counted = self._left(copy.spent, now - copy.since_s)
                one = one if counted is None else _without(one, counted)
            self._count_here(one, now, now)

    # ---------------------------------------------------------------- copies

    def copy_all(self, links: Iterable[OwnerLink], now: float) -> None:
        """Send copies of all that is counted here and that these gateways own next."""
        services = [key for key, one in self._picker.admission.services.items() if len(one.controller.quotas)]
        self._send_copies(links, services, self._picker.key_limits.names, now, is_all=True)

    def keep_copies(self, gateway: str, message: messages.SpentCopies, now: float) -> None:
        """Keep what an owner has counted."""
        copies = self._copies.get(gateway)
        if copies is None or copies.instance != message.instance:
            self._give_back(gateway)
            copies = self._copies[gateway] = _Copies(message.instance)
        known = copies.by_limit
        for spent in message.spent:
            limit = spent.service, spent.name
            if (former := known.get(limit)) is not None and former.is_counted:
                continue  # it has another owner by the list of this gateway, and hands over
            known.pop(limit, None)
            known[limit] = _Copy(now, spent)
        for limit in list(known)[: max(0, len(known) - MAX_COPIES)]:
            del known[limit]

    def _give_back(self, gateway: str) -> None:
        """A gateway has another process: what the former one has counted waits for it.

        If another gateway owns next meanwhile, that one has copies too, and gives them back.
        """
        if (copies := self._copies.pop(gateway, None)) is not None:
            uncounted = (one for one in copies.by_limit.values() if not one.is_counted)
            own = self._ownership.own_name
            self._wait_for((one.since_s, one.spent) for one in uncounted if own in self._owners(one.spent))

    def _count_copies(self, now: float) -> None:
        """Count what is owned here now, and forget what has another owner or is refilled."""
        own = self._ownership.own_name
        if not self._ownership.candidates:
            return  # this process has just started, and the owner may run
        for gateway, copies in list(self._copies.items()):
            for limit, copy in list(copies.by_limit.items()):
                owner = self._owner(copy.spent)
                is_useful = owner == own or (owner == gateway and not copy.is_counted)
                if not is_useful or self._is_over(copy.spent, now - copy.since_s):
                    del copies.by_limit[limit]
                elif owner == own and not copy.is_counted:
                    copy.is_counted = True
                    self._count_here(copy.spent, copy.since_s, now)
            if not copies.by_limit:
                del self._copies[gateway]

    def _on_quota_use(self, key: str) -> None:
        if self._links:
            self._used_services.add(key)
            self._schedule()

    def _on_key_use(self, name: str) -> None:
        if self._links:
            self._used_keys.add(name)
            self._schedule()

    def _schedule(self) -> None:
        """Send copies after this turn of the loop, or when the last ones are old enough."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._copied_s + COPY_SECONDS), self._on_due)

    def _on_due(self) -> None:
        self._timer, self._copied_s = None, asyncio.get_running_loop().time()
        services, self._used_services = self._used_services, set()
        keys, self._used_keys = self._used_keys, set()
        self._send_copies(self._links.values(), services, keys, time.monotonic(), is_all=False)

    def _send_copies(
        self, links: Iterable[OwnerLink], services: Iterable[str], keys: Iterable[str], now: float, *, is_all: bool
    ) -> None:
        ownership, own = self._ownership, self._ownership.own_name
        by_gateway: dict[str, list[messages.SpentLimit]] = {
            link.name: [] for link in links if link.is_ready and link.instance
        }
        if not by_gateway:
            return
        for key in services:
            if ownership.owner_of(key) == own and (copies := by_gateway.get(ownership.next_owner_of(key))) is not None:
                changed = self._picker.admission.changed_quotas(key, now, is_all=is_all)
                copies += [messages.SpentLimit(tenant, *spent, service=key) for tenant, spent in changed.items()]
        for name in keys:
            if ownership.owner_of_key(name) != own:
                continue
            if (copies := by_gateway.get(ownership.next_owner_of_key(name))) is not None:
                copies += [_of_key(*found) for found in self._picker.key_limits.spent([name], now)]
        for gateway, found in by_gateway.items():
            for batch in _batches(found):
                self._links[gateway].send(messages.SpentCopies(self.instance, batch))

    # ---------------------------------------------------------------- limits

    def _wait_for(self, spent: Iterable[tuple[float, messages.SpentLimit]]) -> None:
        self._waiting += spent
        del self._waiting[: max(0, len(self._waiting) - MAX_COPIES)]

    def _given_up(self, now: float, owner: str) -> Iterator[messages.SpentLimit]:
        picker, ownership = self._picker, self._ownership

        def is_moved(now_at: str) -> bool:
            return now_at == owner if owner else now_at != ownership.own_name

        for key in [key for key in picker.admission.services if is_moved(ownership.owner_of(key))]:
            for tenant, spent in picker.admission.take_spent_quotas(key, now).items():
                yield messages.SpentLimit(tenant, *spent, service=key)
        for found in picker.key_limits.take_spent(lambda name: is_moved(ownership.owner_of_key(name)), now):
            yield _of_key(*found)

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

    def _is_over(self, spent: messages.SpentLimit, waited_s: float) -> bool:
        """Whether all is refilled, or has waited long enough for a service that is not known."""
        if self._is_known(spent):
            return self._left(spent, waited_s) is None
        return waited_s >= WAIT_SECONDS

    def _owner(self, spent: messages.SpentLimit) -> str:
        if spent.service is None:
            return self._ownership.owner_of_key(spent.name)
        return self._ownership.owner_of(spent.service)

    def _owners(self, spent: messages.SpentLimit) -> tuple[str, str]:
        """Returns its owner and the one that owns it next."""
        if spent.service is None:
            return self._owner(spent), self._ownership.next_owner_of_key(spent.name)
        return self._owner(spent), self._ownership.next_owner_of(spent.service)

    def _is_known(self, spent: messages.SpentLimit) -> bool:
        """Whether it can be counted. A process that has just started knows no services yet."""
        return spent.service is None or spent.service in self._picker.admission.services

    def _count_here(self, spent: messages.SpentLimit, since_s: float, now: float) -> None:
        """Count what was spent before `since_s`, once its service is known here."""
        if self._is_known(spent):
            self._spend(self._left(spent, now - since_s), now)
        else:
            self._wait_for([(since_s, spent)])

    def _spend(self, spent: messages.SpentLimit | None, now: float) -> None:
        if spent is None:
            return
        amount = Spent(spent.requests, spent.tokens)
        if spent.service is not None:
            self._picker.admission.spend_quota(spent.service, spent.name, amount, now)
            self._on_quota_use(spent.service)
            return
        identity = Identity(
            spent.name, requests_per_minute=spent.requests_per_minute, tokens_per_minute=spent.tokens_per_minute
        )
        self._picker.key_limits.spend(identity, amount, now)
        self._on_key_use(spent.name)


def _batches(spent: list[messages.SpentLimit]) -> Iterator[list[messages.SpentLimit]]:
    return (spent[start : start + messages.MAX_BATCH] for start in range(0, len(spent), messages.MAX_BATCH))


def _of_key(identity: Identity, spent: Spent) -> messages.SpentLimit:
    limits = identity.requests_per_minute, identity.tokens_per_minute
    return messages.SpentLimit(identity.key_name, *spent, None, *limits)


def _without(spent: messages.SpentLimit, counted: messages.SpentLimit) -> messages.SpentLimit:
    """Returns what is not counted yet."""
    requests, tokens = max(0.0, spent.requests - counted.requests), max(0.0, spent.tokens - counted.tokens)
    return msgspec.structs.replace(spent, requests=requests, tokens=tokens)
