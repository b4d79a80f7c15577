"""The errors of Plimsoll: one tree, so that a caller handles what it can name and passes on the rest.

PlimsollError
|- InvalidSpec          the user's object is invalid; retrying does not help
`- ClusterError         the API server returned an error, or did not respond
   |- NotFound  Conflict  ObjectRejected  Forbidden   (ObjectRejected: the object itself is invalid)
   |- ServiceDeleted       the service is gone, so there is nothing left to do for it
   |- BackendUnavailable   unreachable, slow or overloaded; retry after `retry_after_seconds`
   |  `- UntrustedPeer     a certificate is missing or wrong, on either side
   `- LeaseLost            this process no longer holds the lease, so it must not write
"""

from __future__ import annotations


def cause_of(error: BaseException) -> str:
    """Return the error's message, or its type if it has none, as an expired time limit."""
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
    """The API server returned an error or is unreachable; `status` is its HTTP status, 0 if there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NotFound(ClusterError):
    """The object is not there."""


class Conflict(ClusterError):
    """Somebody else was faster, or the object already exists."""


class ObjectRejected(ClusterError):
    """The API server rejects the object as invalid; the message is the server's."""


class Forbidden(ClusterError):
    """Our role does not allow this call, or an admission policy forbids the object."""


class ServiceDeleted(ClusterError):
    """The service was deleted, though its watch has not said so yet."""


class BackendUnavailable(ClusterError):
    """The API server is unreachable, overloaded or slow."""

    def __init__(self, message: str, status: int = 0, retry_after_seconds: float | None = None) -> None:
        super().__init__(message, status)
        self.retry_after_seconds = retry_after_seconds


class UntrustedPeer(BackendUnavailable):
    """A certificate is missing or wrong, on either side."""


class LeaseLost(ClusterError):
    """The lease is not ours any more: a write now could fight the next leader."""


def failure_reason(error: ClusterError) -> str:
    """Return the kind of a failed call of the API server in one word, as metrics name it."""
    kinds = (
        (Conflict, "conflict"),
        (ObjectRejected, "rejected"),
        (Forbidden, "forbidden"),
        (NotFound, "not_found"),
        (BackendUnavailable, "unavailable"),
    )
    return next((reason for kind, reason in kinds if isinstance(error, kind)), "other")
