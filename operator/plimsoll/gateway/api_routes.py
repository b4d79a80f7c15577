"""The routes that engines serve to clients through the gateway, and what the gateway must know of each.

Paths, fields and tasks are those of vLLM. A service serves the routes of its `spec.model.task`. A route that books
nothing costs an engine no step of its model; it passes admission control by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from plimsoll.core.types import Task


class ErrorShape(StrEnum):
    """The JSON of an error, as the SDKs of an API read it."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"


class BodyForm(StrEnum):
    """Which fields of a request's body hold its prompt and its output limit."""

    COMPLETION = "completion"
    MESSAGES = "messages"
    RESPONSES = "responses"
    EMBEDDING = "embedding"
    SCORING = "scoring"
    TOKENS = "tokens"
    AUDIO = "audio"

    __hash__ = str.__hash__  # Enum.__hash__ is slow Python code


CHAT_PATH: Final = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """One POST route. `tasks` are those whose models serve it. `is_booked`: it takes capacity of an engine."""

    path: str
    form: BodyForm
    tasks: frozenset[Task]
    shape: ErrorShape = ErrorShape.OPENAI
    is_booked: bool = True

    @property
    def is_prefill_only(self) -> bool:
        """Whether an engine generates nothing for it beyond the step that computes the prompt."""
        return self.form in (BodyForm.EMBEDDING, BodyForm.SCORING)

    @property
    def is_chat(self) -> bool:
        """Whether engines read `messages` of its body, and no `prompt`."""
        return self.path == CHAT_PATH


_GENERATE, _EMBED = frozenset({Task.GENERATE}), frozenset({Task.EMBED})
_SCORE, _TRANSCRIBE = frozenset({Task.EMBED, Task.SCORE}), frozenset({Task.TRANSCRIBE})
_ANTHROPIC: Final = ErrorShape.ANTHROPIC

CHAT_ROUTE: Final = ApiRoute(CHAT_PATH, BodyForm.COMPLETION, _GENERATE)
MODELS_PATH: Final = "/v1/models"
EVENT_STREAM: Final = "text/event-stream"  # accepted by a client that requests the progress of a model
MESSAGES_PATH: Final = "/v1/messages"
RESPONSES_PATH: Final = "/v1/responses"

_ALL: Final = (
    CHAT_ROUTE,
    ApiRoute("/v1/completions", BodyForm.COMPLETION, _GENERATE),
    ApiRoute(RESPONSES_PATH, BodyForm.RESPONSES, _GENERATE),
    ApiRoute(MESSAGES_PATH, BodyForm.MESSAGES, _GENERATE, _ANTHROPIC),
    ApiRoute(f"{MESSAGES_PATH}/count_tokens", BodyForm.TOKENS, _GENERATE, _ANTHROPIC, is_booked=False),
    ApiRoute("/v1/embeddings", BodyForm.EMBEDDING, _EMBED),
    *(ApiRoute(path, BodyForm.SCORING, _SCORE) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    *(ApiRoute(path, BodyForm.SCORING, _SCORE) for path in ("/score", "/v1/score")),
    ApiRoute("/v1/audio/transcriptions", BodyForm.AUDIO, _TRANSCRIBE),
    ApiRoute("/v1/audio/translations", BodyForm.AUDIO, _TRANSCRIBE),
    ApiRoute("/tokenize", BodyForm.TOKENS, frozenset(Task), is_booked=False),
    ApiRoute("/detokenize", BodyForm.TOKENS, frozenset(Task), is_booked=False),
)

ROUTES: Final[Mapping[str, ApiRoute]] = MappingProxyType({route.path: route for route in _ALL})
_BY_BYTES: Final = {path.encode(): route for path, route in ROUTES.items()}


def route_of(path: bytes) -> ApiRoute:
    """Returns the route of a request's path, with or without a query. Envoy sends no other paths."""
    return _BY_BYTES.get(path.partition(b"?")[0], CHAT_ROUTE)


def paths_of(task: Task) -> Iterable[str]:
    """Returns the paths that a model of this task serves."""
    return (path for path, route in ROUTES.items() if task in route.tasks)
