"""What `core.planning.retuning` remembers of a service. A checkpoint stores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from plimsoll.core.codec import Amount, Count, Length, Number

CONFIRMING_HOURS: Final = 24
MAX_REFUSED: Final = 8  # chunks; more than there are to choose from


@dataclass(frozen=True, slots=True)
class Hour:
    """load_per_s: mean arrivals per replica. met: minutes within the SLO, of those that count."""

    load_per_s: Amount = 0.0
    met: Count = 0
    minutes: Count = 0

    def validate(self) -> None:
        if self.met > self.minutes:
            raise ValueError(f"{self.met} of {self.minutes} minutes are within the SLO")

    @property
    def met_share(self) -> float:
        return self.met / max(1, self.minutes)


@dataclass(frozen=True, slots=True)
class RefusedChunk:
    """A chunk that made the SLO worse, and until when it is not tried again."""

    chunk: Count
    until_s: float


Hours = Annotated[tuple[Hour, ...], Length(0, CONFIRMING_HOURS)]


@dataclass(frozen=True, slots=True)
class RetuningState:
    """State of a service's serve tier. Times in seconds since the epoch.

    changed_s: of the last change, or of the first minute. own: the engines' chunk without a measured one, 0 if
    unknown. hour: the present one, since hour_s. hours: those since the last change. before: those before it, while it
    is judged. former: the chunk to return to. preferred: chunk that the last `votes` hours prefer. wanted: the chunk to
    roll out, 0 for the template's own, None for no change. reason: of the last change. basis: of the hours, see Minute.
    """

    revision: Annotated[str, Length(0, 253)] = ""
    changed_s: float = 0.0
    own: Count = 0
    minute_s: float = 0.0
    hour_s: float = 0.0
    hour: Hour = Hour()
    hours: Hours = ()
    before: Hours = ()
    former: Count = 0
    preferred: Count = 0
    votes: Annotated[int, Number(0, CONFIRMING_HOURS)] = 0
    wanted: Count | None = None
    is_undo: bool = False
    reason: Annotated[str, Length(0, 512)] = ""
    refused: Annotated[tuple[RefusedChunk, ...], Length(0, MAX_REFUSED)] = ()
    basis: Annotated[str, Length(0, 64)] = ""

    @property
    def summary(self) -> str:
        """What the measurements say, in a sentence; empty before the first full hour."""
        if self.wanted is not None:
            return f"to be rolled out: {self.reason}"
        if self.before:
            return f"the last change is compared with {len(self.before)} h before it; hours since: {len(self.hours)}"
        if self.votes:
            return f"measurements prefer a chunk of {self.preferred} for {self.votes} of {CONFIRMING_HOURS} h"
        return "measurements prefer no other chunk" if self.hours else ""
