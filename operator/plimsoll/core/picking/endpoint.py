"""What a choice is made from: engine pods as they stand, what each of them holds, and the size of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What an engine does; `serve` does both."""

    PREFILL = "prefill"
    DECODE = "decode"
    SERVE = "serve"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine pod.

    address: `ip:port` of its API (IPv6 in brackets). revision: engines of one revision can exchange KV blocks.
    ready: its launcher says so; a draining pod is not ready. terminating: its deletion was asked for.
    routable: the proxy lists it as healthy; a prefill engine is called by decode engines, so it needs no proxy.
    """

    address: str
    pod: str
    role: Role
    revision: str
    ready: bool
    terminating: bool = False
    routable: bool = False

    @property
    def live(self) -> bool:
        """May be given to the proxy, or to a decode engine as its prefill engine."""
        return self.ready and not self.terminating


@dataclass(slots=True)
class Load:
    """What is known of an endpoint's work.

    inflight: requests sent and not ended. turn: number of the last pick that chose it; breaks ties fairly.
    doubtful: it lately refused or reset a connection; taken only where nothing better is left.
    """

    inflight: int = 0
    turn: int = 0
    doubtful: bool = False


@dataclass(frozen=True, slots=True)
class Prompt:
    """Size of a request: tokens of one prompt (counted where they come as numbers, else estimated), and sequences."""

    tokens: int
    sequences: int = 1
