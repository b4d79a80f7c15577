"""The LoRA adapters that have requests at each engine of one service, and whose turn it is where there are too many.

Problem: a batch of vLLM takes at most `max_adapters` adapters (`--max-loras`). While these have requests, it starts
none of another adapter: such a request waits in the engine, whatever the gateway predicted.

Idea: an engine has `max_adapters` places. An adapter holds one while it has requests there, and no request goes to an
engine where its adapter has no place and none is free. An adapter without any place waits. Once another one has held
its place for `TURN_S`, the one that waits claims that place: the engine takes no new requests of the holder, and the
first place there that becomes free is kept for the claim. So adapters take turns, whatever their load. An engine with
requests of too many adapters, because others sent them, gets none of any adapter: it is unknown which one starves.

An adapter without requests stays in GPU memory until its place is needed (least recently used first, as in vLLM). The
load of another one from CPU memory takes `load_s`, which is learned from first tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

TURN_S: Final = 20.0  # how long an adapter holds its place before another one may claim it
CLAIM_GRACE_S: Final = 3.0  # how long a claim outlives the time at which its clients were to return
FIRST_LOAD_S: Final = 0.1  # assumed time of a load before the first measurement
_LOAD_WEIGHT: Final = 0.1  # of one measurement


class Claim(NamedTuple):
    """A waiting adapter has claimed a place at `address`, which takes no new requests of `holder` meanwhile."""

    address: str
    holder: str


@dataclass(slots=True)
class _Place:
    """An adapter in the GPU memory of an engine. It holds its place since `since_s` while it has `requests`."""

    requests: int = 0
    since_s: float = 0.0


@dataclass(slots=True)
class _Engine:
    """One engine's adapters, least recently used first, how many have requests, and the holders by waiting adapter."""

    places: dict[str, _Place] = field(default_factory=dict)
    held: int = 0
    claims: dict[str, str] = field(default_factory=dict)


class AdapterSlots:
    """The adapters of one service. `max_adapters` is 0 for a service without LoRA. Times are of the controller."""

    def __init__(self) -> None:
        self.max_adapters = 0
        self.load_s = FIRST_LOAD_S
        self._engines: dict[str, _Engine] = {}
        self._not_loaded_on: Mapping[str, Collection[str]] = {}
        self._active: Counter[str] = Counter()  # engines where an adapter has requests
        self._waiting: dict[str, float] = {}  # until when each adapter waits, the first that waited first

    @property
    def most_active(self) -> int:
        """The largest number of adapters that have requests at one engine."""
        return max((engine.held for engine in self._engines.values()), default=0)

    @property
    def waiting(self) -> int:
        """The number of adapters that wait for a place."""
        return len(self._waiting)

    def configure(self, max_adapters: int, not_loaded_on: Mapping[str, Collection[str]]) -> None:
        """Set the limit, and the engines that have not loaded an adapter, by adapter, as far as that is known."""
        self.max_adapters, self._not_loaded_on = max_adapters, not_loaded_on

    def set_engines(self, addresses: Collection[str]) -> None:
        """Set the ready engines. Removed ones lose their adapters."""
        for address in [address for address in self._engines if address not in addresses]:
            for adapter, place in self._engines.pop(address).places.items():
                if place.requests:
                    self._deactivate(adapter)
        for address in addresses:
            self._engines.setdefault(address, _Engine())

    def add(self, address: str, adapter: str, now: float) -> bool:
        """Count a request that goes to an engine. Returns whether the engine must load the adapter for it."""
        engine = self._engines[address]
        place = engine.places.pop(adapter, None)
        is_load = place is None
        place = engine.places[adapter] = place or _Place()
        if not place.requests:
            place.since_s, engine.held = now, engine.held + 1
            self._active[adapter] += 1
        place.requests += 1
        self._stop_waiting(adapter)
        if len(engine.places) > self.max_adapters:
            idle = (name for name, other in engine.places.items() if not other.requests)
            if (evicted := next(idle, None)) is not None:
                del engine.places[evicted]
        return is_load

    def remove(self, address: str, adapter: str) -> None:
        """Count the end of a request."""
        engine = self._engines.get(address)
        place = None if engine is None else engine.places.get(adapter)
        if engine is None or place is None:
            return
        place.requests -= 1
        if place.requests:
            return
        engine.held -= 1
        self._deactivate(adapter)
        if len(engine.places) > self.max_adapters:
            del engine.places[adapter]

    def is_loaded(self, adapter: str, address: str | None = None) -> bool:
        """Whether an engine has the adapter in GPU memory; `address` None means any engine."""
        engines = self._engines.values() if address is None else (self._engines[address],)
        return any(adapter in engine.places for engine in engines)

    def observe_load(self, seconds: float) -> None:
        """Record by how much the first token was later than without a load."""
        self.load_s += _LOAD_WEIGHT * (max(0.0, seconds) - self.load_s)

    def is_open(self, adapter: str) -> bool:
        """Whether a request of this adapter may go to some engine."""
        return not self.max_adapters or any(self._allows(address, adapter) for address in self._with_file(adapter))

    def choices(self, adapter: str) -> tuple[list[str], list[str]]:
        """Returns the engines that a request may go to: those to prefer, and the others.

        While fewer adapters are in use than an engine has places, all engines are alike, because none can run short.
        Otherwise those come first where the adapter has requests, so that it takes no further place.
        """
        allowed = [address for address in self._with_file(adapter) if self._allows(address, adapter)]
        in_use = len(self._active) + sum(name not in self._active for name in self._waiting)
        in_use += adapter not in self._active and adapter not in self._waiting
        if in_use <= self.max_adapters:
            return allowed, []
        held = [address for address in allowed if self._holds(address, adapter)]
        return held, [address for address in allowed if not self._holds(address, adapter)] if held else allowed

    def wait(self, adapter: str, until_s: float, now: float) -> None:
        """A request of this adapter found no place, and will be here until `until_s`, or come again then.

        An adapter that has a place somewhere takes others only when they are free.
        """
        if adapter not in self._active:
            self._waiting[adapter] = max(until_s + CLAIM_GRACE_S, self._waiting.get(adapter, 0.0))
            self._claim(adapter, now)

    def update(self, now: float) -> None:
        """Forget adapters that wait no longer, and let the others claim places. Call this at each tick."""
        for adapter in [name for name, until_s in self._waiting.items() if until_s <= now]:
            self._stop_waiting(adapter)
        for adapter in self._waiting:
            self._claim(adapter, now)

    def claim_of(self, adapter: str) -> Claim | None:
        """Returns the claim of a waiting adapter, None without one."""
        for address, engine in self._engines.items():
            if adapter in engine.claims:
                return Claim(address, engine.claims[adapter])
        return None

    def next_turn_s(self, adapter: str) -> float:
        """Returns when an adapter without a claim can claim a place, given those that waited before it."""
        ends = sorted(place.since_s + TURN_S for place in self._claimable(adapter).values())
        ahead = [name for name in self._waiting if self.claim_of(name) is None]
        position = ahead.index(adapter) if adapter in ahead else len(ahead)
        return ends[min(position, len(ends) - 1)] if ends else 0.0

    def _with_file(self, adapter: str) -> Iterable[str]:
        """Returns the engines that have loaded the adapter's file, or all if none has."""
        missing = self._not_loaded_on.get(adapter)
        if not missing:
            return self._engines
        return [address for address in self._engines if address not in missing] or self._engines

    def _holds(self, address: str, adapter: str) -> bool:
        place = self._engines[address].places.get(adapter)
        return place is not None and place.requests > 0

    def _allows(self, address: str, adapter: str) -> bool:
        engine = self._engines[address]
        if self._holds(address, adapter):
            return engine.held <= self.max_adapters and adapter not in engine.claims.values()
        ahead = list(engine.claims).index(adapter) if adapter in engine.claims else len(engine.claims)
        return engine.held + ahead < self.max_adapters

    def _claimable(self, adapter: str) -> dict[Claim, _Place]:
        """Returns the places that an adapter may claim when their turns end."""
        return {
            Claim(address, name): place
            for address in self._with_file(adapter)
            for name, place in self._engines[address].places.items()
            if place.requests and name not in self._engines[address].claims.values()
        }

    def _claim(self, adapter: str, now: float) -> None:
        """Claim the place that was held longest, first among adapters with several places."""
        if self.claim_of(adapter) is not None or self.is_open(adapter):
            return
        ended = {claim: place for claim, place in self._claimable(adapter).items() if place.since_s + TURN_S <= now}
        if ended:
            address, holder = min(ended, key=lambda one: (self._active[one.holder] == 1, ended[one].since_s))
            self._engines[address].claims[adapter] = holder

    def _stop_waiting(self, adapter: str) -> None:
        if self._waiting.pop(adapter, None) is not None:
            for engine in self._engines.values():
                engine.claims.pop(adapter, None)

    def _deactivate(self, adapter: str) -> None:
        self._active[adapter] -= 1
        if not self._active[adapter]:
            del self._active[adapter]
