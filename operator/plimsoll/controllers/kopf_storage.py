"""Storages for kopf that neither read nor write an object.

Problem: kopf's own storages decode annotations of each object before its handler runs. A user who writes
`kopf.zalando.org/last-handled-configuration: "{"` hides all changes and the deletion of the object from the operator.
Idea: the operator's only handler takes raw events, which need no stored state. So nothing is stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kopf import DiffBaseStorage, ProgressStorage


class NoDiffBase(DiffBaseStorage):
    """Every object is new to kopf, and has no content that it compares."""

    def build(self, *, body: Any, extra_fields: Iterable[Any] | None = None) -> Any:
        return {}

    def fetch(self, *, body: Any) -> Any:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        pass


class NoProgress(ProgressStorage):
    """No handler has progress."""

    def fetch(self, *, key: Any, body: Any) -> Any:
        return None

    def store(self, *, key: Any, record: Any, body: Any, patch: Any) -> None:
        pass

    def purge(self, *, key: Any, body: Any, patch: Any) -> None:
        pass

    def touch(self, *, body: Any, patch: Any, value: str | None) -> None:
        pass

    def clear(self, *, essence: Any) -> Any:
        return essence
