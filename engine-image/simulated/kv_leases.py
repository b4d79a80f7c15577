"""Leases of KV that a prefill engine holds for decode engines.

The blocks of a prompt are held until they are fetched, or until no decode engine has claimed them in time.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulated.sequence import ServedSequence


@dataclass(slots=True)
class Lease:
    """A sequence whose blocks are held. expires_s: infinite while a decode engine fetches them."""

    sequence: ServedSequence
    expires_s: float


class LeaseTable:
    """Leases by request; each lasts for duration_s after the last activity of its decode engine. Times in seconds."""

    def __init__(self, duration_s: float) -> None:
        self.duration_s = duration_s
        self._leases: dict[str, Lease] = {}

    def grant(self, sequence: ServedSequence, now_s: float) -> None:
        """Hold a sequence's blocks."""
        self._leases[sequence.request_id] = Lease(sequence, now_s + self.duration_s)

    def claim(self, request_id: str) -> int | None:
        """Stop the expiry for a connected decode engine. Returns the prompt's tokens, None without a lease."""
        lease = self._leases.get(request_id)
        if lease is None:
            return None
        lease.expires_s = float("inf")
        return lease.sequence.prompt_tokens

    def restart_expiry(self, request_id: str, now_s: float) -> None:
        """Restart the expiry after a decode engine has disconnected without fetching."""
        if request_id in self._leases:
            self._leases[request_id].expires_s = now_s + self.duration_s

    def pop(self, request_id: str) -> ServedSequence | None:
        """End a lease and return its sequence, None without a lease."""
        lease = self._leases.pop(request_id, None)
        return lease.sequence if lease else None

    def next_expiry_s(self) -> float:
        """Return when the next lease expires; infinite without one."""
        return min((lease.expires_s for lease in self._leases.values()), default=float("inf"))

    def pop_expired(self, now_s: float) -> list[ServedSequence]:
        """End the leases that have expired and return their sequences."""
        expired_ids = [name for name, lease in self._leases.items() if lease.expires_s <= now_s]
        return [self._leases.pop(name).sequence for name in expired_ids]
