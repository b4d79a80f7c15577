"""The errors of Plimsoll: one tree, so that a caller names what it can handle and lets the rest pass.

PlimsollError
|- InvalidSpec          the user's object cannot be acted on; retrying does not help
`- ClusterError         the API server said no, or did not answer
   |- NotFound  Conflict  ObjectRejected  Forbidden   (ObjectRejected: the object itself is at fault)
   |- BackendUnavailable   away, slow or asking for patience; try again after `retry_after_seconds`
   `- LeaseLost            this process no longer holds the lease, so it must not write
"""

from __future__ import annotations


def cause_of(error: BaseException) -> str:
    """The error's own words, or what it is: an expired time limit has none."""
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


class PlimsollError(Exception):
    """Base of every error that Plimsoll raises on purpose."""


class InvalidSpec(PlimsollError):
    """An InferenceService that cannot be acted on.

    problems: one sentence each, beginning with the full path of the field at fault.
    """

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class ClusterError(PlimsollError):
    """The API server refused or could not be asked; `status` is its HTTP status, 0 if there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NotFound(ClusterError):
    """The object is not there."""


class Conflict(ClusterError):
    """Somebody else was faster, or the object already exists."""


class ObjectRejected(ClusterError):
    """The API server finds fault with the object; its own words are the message."""


class Forbidden(ClusterError):
    """Our role does not allow this call, or an admission policy forbids the object."""


class BackendUnavailable(ClusterError):
    """The API server is away, overloaded or slow."""

    def __init__(self, message: str, status: int = 0, retry_after_seconds: float | None = None) -> None:
        super().__init__(message, status)
        self.retry_after_seconds = retry_after_seconds


class LeaseLost(ClusterError):
    """The lease is not ours any more: a write now could fight the next leader."""
