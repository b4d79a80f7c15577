"""Start-up times of one tier by what its replicas are made of: a ledger for each variant, the present one among them.

Problem: another image, model or GPU starts in another time. Times of both in one ledger are neither's; and who rolls
back must not begin anew.

Idea: each start counts for the variant of its own pod. A new variant begins at the medians of the last one of the same
model, with the doubt of a guess: most changes are small, and one start outweighs a guess (`lifecycle`). Another model
has other weights to load, so it begins where nothing is known. A few variants are kept, those last used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from plimsoll.core import lifecycle
from plimsoll.core.lifecycle import Learned, Ledger, record

VERSION: Final = 2  # 1 was a ledger alone
MOST_KEPT: Final = 4
MOST_CHARACTERS: Final = 1024  # of each part of a name


class Variant(NamedTuple):
    """What a replica is made of: model, with its revision; engine image; GPUs and where, in words. Empty: unknown."""

    model: str = ""
    image: str = ""
    gpus: str = ""

    @property
    def words(self) -> str:
        """For people; empty where nothing is known."""
        return ", ".join(filter(None, self))


UNKNOWN: Final = Variant()


class Ledgers(NamedTuple):
    """first: the ledger of a variant of which nothing is known. known: those with starts, and the present one; the last
    used come last. present: of the replicas ordered from now on."""

    first: Ledger
    known: tuple[tuple[Variant, Ledger], ...] = ()
    present: Variant = UNKNOWN

    @property
    def ledger(self) -> Ledger:
        """The present variant's."""
        return self.of(self.present)

    @property
    def measured(self) -> bool:
        """Whether starts were seen of the present variant, or of another one of its model."""
        return any(ledger.whole.starts and name.model == self.present.model for name, ledger in self.known)

    def of(self, variant: Variant) -> Ledger:
        """A variant's, known or not."""
        for name, ledger in self.known:
            if name == variant:
                return ledger
        alike = [ledger for name, ledger in self.known if name.model == variant.model]
        return _guess(alike[-1]) if alike else self.first


def becomes(ledgers: Ledgers, variant: Variant) -> Ledgers:
    """The same with another present variant. What was learned before any variant was told is of the first one told."""
    if variant in (ledgers.present, UNKNOWN):
        return ledgers
    if ledgers.present == UNKNOWN:
        renamed = [(variant if name == UNKNOWN else name, ledger) for name, ledger in ledgers.known]
        known = renamed if len(dict(renamed)) == len(renamed) else [one for one in ledgers.known if one[0] != UNKNOWN]
        ledgers = ledgers._replace(known=tuple(known))
    return _used(ledgers._replace(present=variant), variant, ledgers.of(variant))


def started(ledgers: Ledgers, variant: Variant, took_s: Sequence[tuple[str, float]]) -> Ledgers:
    """After a pod of a variant became ready; took_s: as for `record`, whose ValueError it raises. Of one that is not
    told: of the present one."""
    variant = ledgers.present if variant == UNKNOWN else variant
    return _used(ledgers, variant, record(ledgers.of(variant), took_s))


def _used(ledgers: Ledgers, variant: Variant, ledger: Ledger) -> Ledgers:
    """With this ledger, last; of too many the one goes that was not used for longest, but never the present one."""
    others = [one for one in ledgers.known if one[0] != variant]
    while len(others) >= MOST_KEPT:
        others.remove(next(one for one in others if one[0] != ledgers.present))
    return ledgers._replace(known=(*others, (variant, ledger)))


def _guess(ledger: Ledger) -> Ledger:
    """One that has seen no start, with the medians of another."""
    phases = tuple((name, Learned(learned.quantile_s(0.5))) for name, learned in ledger.phases)
    return Ledger(phases, Learned(ledger.whole.quantile_s(0.5)))


def to_dict(ledgers: Ledgers) -> dict[str, Any]:
    """As JSON can hold it: about 1 KB a variant."""
    return {
        "version": VERSION,
        "present": list(ledgers.present),
        "known": [[list(name), lifecycle.to_dict(ledger)] for name, ledger in ledgers.known],
    }


def from_dict(stored: Mapping[str, Any], first: Ledger) -> Ledgers:
    """What `to_dict` gave, or a release that kept one ledger for all. Raises ValueError for anything else."""
    if not isinstance(stored, Mapping):
        raise ValueError("no ledgers of start-up times")
    if stored.get("version") != VERSION:
        return Ledgers(first, ((UNKNOWN, lifecycle.from_dict(stored)),))
    known = stored.get("known")
    if not isinstance(known, list) or len(known) > MOST_KEPT:
        raise ValueError(f"at most {MOST_KEPT} variants are kept, not {str(known)[:80]}")
    try:
        read = {_variant(name): lifecycle.from_dict(ledger) for name, ledger in known}
    except (TypeError, ValueError) as error:
        raise ValueError(f"no variant and its ledger: {error}") from error
    return Ledgers(first, tuple(read.items()), _variant(stored.get("present")))


def _variant(stored: Any) -> Variant:
    if not isinstance(stored, list) or len(stored) != len(Variant._fields):
        raise ValueError(f"a variant is named by {len(Variant._fields)} words, not {str(stored)[:80]}")
    if not all(isinstance(part, str) and len(part) <= MOST_CHARACTERS for part in stored):
        raise ValueError(f"a variant is named by words, not {str(stored)[:80]}")
    return Variant(*stored)
