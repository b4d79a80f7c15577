"""The output limit of a service, for requests without one.

Problem: the engine rejects a request if its prompt and output limit together exceed the model's context. Without a
limit in the request, the engine ends the output at the context instead. Idea: the limit is added to the body. If the
engine responds with 400, it gets the original body: then either the context leaves less than the limit, or the engine
rejects the body itself.
"""

from __future__ import annotations

from launcher import request_body
from launcher.api_formats import AUDIO_PATHS, CHAT_PATH, COMPLETIONS_PATH, FORMATS, MESSAGES_PATH
from launcher.asgi import Message, Send

COMPLETION_DEFAULT = 16  # output tokens of a completion that has no `max_tokens`, in the API and in vLLM
UNLIMITED_PATHS = (*AUDIO_PATHS, MESSAGES_PATH)  # a transcript is as long as its sound; a message must state a limit


def with_output_limit(body: bytes, path: str, limit: str) -> bytes:
    """Return the body with `limit` (empty for none) as its output limit; unchanged if it has one."""
    if not limit or path not in FORMATS or path in UNLIMITED_PATHS:
        return body
    document = request_body.parse(body)
    if not isinstance(document, dict):
        return body
    name = FORMATS[path].output_limit
    stated = (name, "max_completion_tokens") if path == CHAT_PATH else (name,)
    if any(document.get(field) is not None for field in stated):
        return body
    tokens = int(limit)
    if path == COMPLETIONS_PATH and name not in document and tokens >= COMPLETION_DEFAULT:
        return body
    return request_body.add_fields(body, {name: tokens})


class BufferedRejection:
    """Forwards a response, except a 400: that is discarded, and `rejected` is true."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.rejected = False

    async def send(self, message: Message) -> None:
        """One event of the answer."""
        if message["type"] == "http.response.start":
            self.rejected = message["status"] == 400
        if not self.rejected:
            await self._send(message)
