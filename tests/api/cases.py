"""A broken manifest with the field and the message that its rejection must name; `all_cases` breaks each constraint.

One table for the three places that validate a manifest: `parse`, a client-side apply and a server-side apply. `says` is
the message of our own rule, which all three use. Where the API server rejects first (types, lengths, required fields),
`server` has its message. Where server-side apply already fails to read the manifest, `typed` has the path and message
of that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.api.manifests import ABSENT, Manifest, service

DURATION = "must be a duration with a unit (us, ms, s, m, h), such as 500ms or 1.5s"
BAD_DURATIONS = ("60", "five minutes", "-1m", "1 m", "", "1d", ".5s")
TOO_MANY_DIGITS = "1" * 33
MODEL, SLO, TIERS = "spec.model", "spec.slo", "spec.tiers"
DECODE = "spec.tiers.decode"
POD = "spec.tiers.decode.pod"
OBJECT_NAME = "must be the name of a Kubernetes object"


@dataclass(frozen=True)
class Case:
    """One broken manifest."""

    edits: dict[str, Any]
    path: str
    message: str
    server_message: str = ""
    typed: tuple[str, str] | None = None
    base: Callable[..., Manifest] = field(default=service)

    @property
    def name(self) -> str:
        """Names the case in a test's id: what is changed, and to what."""
        changed = ", ".join(
            f"{path}={'absent' if value is ABSENT else value!r:.40}" for path, value in self.edits.items()
        )
        return changed.replace("spec.", "")

    def manifest(self) -> Manifest:
        return self.base(**self.edits)


def single_edit(path: str, value: Any, says: str, server: str = "", **more: Any) -> Case:
    """A case whose one changed field is the one at fault."""
    return Case({path: value}, more.pop("at", path), says, server, **more)


def text_cases(
    path: str,
    longest: int,
    says: str = "",
    wrong: Sequence[str] = (),
    *,
    at: str = "",
    build: Callable[[str], Any] = str,
    may_be_empty: bool = False,
    base: Callable[..., Manifest] = service,
) -> list[Case]:
    """Text that is empty, too long, or wrong in a way that `says` tells; `build` puts it into the value of `path`."""
    at = at or path
    empty = single_edit(path, build(""), "must not be empty", "should be at least 1 chars long", at=at, base=base)
    long = single_edit(
        path, build("a" * (longest + 1)), f"must have at most {longest} characters", "Too long", at=at, base=base
    )
    return [
        *([] if may_be_empty else [empty]),
        long,
        *[single_edit(path, build(value), says, at=at, base=base) for value in wrong],
    ]
