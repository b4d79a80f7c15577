"""Parse the body of a request: the fields that the gateway needs, or the reason for a rejection.

Problem: vLLM serves `model: null` with the model that it has loaded, accepts UTF-16, and uses the last of two equal
keys. The gateway rejects what vLLM would serve by mistake. It forwards what vLLM itself rejects, because vLLM's
message is more precise.

Idea: a typed decoder skips all but a few keys. Only `model` must have the right type; other keys with an unusable
value count as absent. Pictures and sound do not count by their base64 text (`media_parts`). A body of 200 kB costs
about 60 us. Which fields hold the prompt depends on the route (`body_forms`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES, MAX_REQUEST_TOKENS
from plimsoll.core.prompt_tokens import corrected_tokens
from plimsoll.core.routing.endpoint import Prompt
from plimsoll.core.types import MediaKind
from plimsoll.gateway.api_routes import CHAT_ROUTE, ApiRoute, BodyForm
from plimsoll.gateway.body_forms import (
    BodyFields,
    CompletionFields,
    decode_fields,
    main_value,
    prompt_size,
    rejected_field,
)
from plimsoll.gateway.byte_search import count_bytes
from plimsoll.gateway.duplicate_keys import find_duplicate, needs_strict_parse, strip_value
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.picture_tokens import DEFAULT_RULE, PictureRule, Pictures
from plimsoll.gateway.request_body import MAX_WHOLE_BYTES, Body, whole

LARGE_BODY_BYTES = 64 * 1024  # a strict parse, or one of many values, of a larger body runs in a worker process
MAX_VALUES = 10_000  # a body of 8 MB with a list in each three bytes costs more than a second
MAX_SEQUENCES_PER_PROMPT = 16_384  # vLLM's limit on `n`
MAX_N = 10**12  # larger values of `n` count as this one
PREFILL_ONLY_TOKENS = 1  # of a route that generates nothing: the step that computes the prompt
_TRUNCATED = "Input data was truncated"  # also said of a string that ends after a high surrogate
_HIGH_SURROGATE = re.compile(rb'(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})"')
_TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


class ParsedRequest(msgspec.Struct):
    """The parsed fields of one request. Treat it as immutable.

    `model` is the name that the client sent. `max_tokens` is the highest of the client's output limits, None if it set
    none. `output_limits` are all of them by field, whatever they are. `stream` is true for server-sent events.
    `prompt_prefix` is the start of the prompt as raw JSON, with digests in the place of base64 text. `n` is the number
    of completions per prompt, at most `MAX_N`. `media_tokens` are those of `prompt.tokens` that are no text, by kind.
    `is_estimated` is false for a prompt of token IDs. `prompt_field` names the field that holds several prompts.
    `pictures` are those of a conversation.
    """

    model: str
    prompt: Prompt
    max_tokens: int | None = None
    stream: bool = False
    prompt_prefix: bytes = b""
    n: int = 1
    media_tokens: Mapping[MediaKind, int] = {}
    is_estimated: bool = True
    prompt_field: str = "prompt"
    output_limits: Mapping[str, object] = {}
    pictures: Pictures = Pictures()

    def for_model(self, rule: PictureRule) -> ParsedRequest:
        """Returns the request with the tokens that its pictures have for a model with this rule."""
        if rule == DEFAULT_RULE or self.pictures == Pictures():
            return self
        before, tokens = self.media_tokens.get(MediaKind.IMAGE, 0), self.pictures.tokens(rule)
        prompt = self.prompt._replace(tokens=min(max(0, self.prompt.tokens - before) + tokens, MAX_REQUEST_TOKENS))
        return msgspec.structs.replace(self, prompt=prompt, media_tokens={**self.media_tokens, MediaKind.IMAGE: tokens})

    def corrected_prompt(self, ratios: Mapping[str, float]) -> Prompt:
        """Returns the prompt with the learned ratio of each kind of content."""
        if not ratios or not self.is_estimated:
            return self.prompt
        tokens = round(corrected_tokens(self.prompt.tokens, self.media_tokens, ratios))
        return self.prompt._replace(tokens=min(tokens, MAX_REQUEST_TOKENS))


class NeedsWorker(Exception):
    """To parse this body would block the event loop for too long."""


def parse_in_loop(body: Body, route: ApiRoute = CHAT_ROUTE) -> ParsedRequest | Rejection:
    """As `parse_body`. Raises NeedsWorker."""
    if not isinstance(body, bytes):
        raise NeedsWorker
    size = len(body)
    if size > LARGE_BODY_BYTES and (size > MAX_WHOLE_BYTES or count_bytes(body, b"[{,") > MAX_VALUES):
        raise NeedsWorker
    return _parse(body, route, LARGE_BODY_BYTES)


def parse_body(body: Body, route: ApiRoute = CHAT_ROUTE) -> ParsedRequest | Rejection:
    """Returns the parsed request or its rejection. Never raises."""
    text = whole(body)
    return _parse(text, route, len(text))


def _parse(body: bytes, route: ApiRoute, max_strict_bytes: int) -> ParsedRequest | Rejection:
    """Raises NeedsWorker for a body of more than `max_strict_bytes` that needs a strict parse."""
    form = route.form
    if not body.strip():
        return Rejection(
            RejectionReason.INVALID_JSON,
            "The request has no body. Send a JSON object that has the field model and the input.",
        )
    if body.startswith(_BYTE_ORDER_MARKS) or not _is_utf8(body):
        return Rejection(
            RejectionReason.INVALID_ENCODING, "The request body must be JSON in UTF-8 without a byte order mark."
        )
    try:
        fields = decode_fields(body, form)
        is_suspicious = needs_strict_parse(strip_value(body, *main_value(fields, form)), form)
        if is_suspicious and len(body) > max_strict_bytes:
            raise NeedsWorker
        duplicate = find_duplicate(body, form) if is_suspicious else None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return Rejection(
            RejectionReason.INVALID_JSON,
            f"The request body is not a valid JSON object: {_describe_error(error, body)}",
        )
    if duplicate is not None:
        return Rejection(
            RejectionReason.DUPLICATE_KEY,
            f"The request body contains the key '{duplicate}' more than once. Send each key once.",
            param=duplicate,
        )
    return _to_request(fields, route)


def _to_request(fields: CompletionFields, route: ApiRoute) -> ParsedRequest | Rejection:
    model = fields.model
    if not isinstance(model, str) or not model:
        return model_required(model)
    if (rejected := rejected_field(fields, route.form)) is not None:
        return rejected
    n = _n(fields.n) if route.form is BodyForm.COMPLETION else 1
    size = prompt_size(fields, route, n)
    output_limits = _output_limits(fields, route)
    max_tokens = PREFILL_ONLY_TOKENS if route.is_prefill_only else _max_tokens(output_limits)
    return ParsedRequest(
        model,
        bounded(size.prompt),
        max_tokens,
        is_true(fields.stream),
        size.prefix,
        n,
        size.media_tokens,
        size.is_estimated,
        size.field,
        output_limits,
        size.pictures,
    )


def model_required(model: object) -> Rejection:
    """Returns the rejection of a request without a usable model name; None if it is absent."""
    problem = "is missing" if model is None else "is empty" if model == "" else "must be a string"
    message = f"The field 'model' {problem}. Set it to a model name from GET /v1/models."
    return Rejection(RejectionReason.MODEL_REQUIRED, message, param="model")


def bounded(prompt: Prompt) -> Prompt:
    """Returns the prompt within the bounds of an `AdmissionRequest`."""
    if prompt.tokens <= MAX_REQUEST_TOKENS and prompt.sequences <= MAX_REQUEST_SEQUENCES:
        return prompt
    return Prompt(min(prompt.tokens, MAX_REQUEST_TOKENS), min(prompt.sequences, MAX_REQUEST_SEQUENCES))


def _output_limits(fields: CompletionFields, route: ApiRoute) -> dict[str, object]:
    """Returns the output limits that engines read on this route."""
    if route.is_chat:
        return {"max_tokens": fields.max_tokens, "max_completion_tokens": fields.max_completion_tokens}
    if route.form is BodyForm.RESPONSES and isinstance(fields, BodyFields):
        return {"max_output_tokens": fields.max_output_tokens}
    return {"max_tokens": fields.max_tokens}


def _max_tokens(limits: Mapping[str, object]) -> int | None:
    """Returns the highest limit: which of two an engine obeys depends on the engine. None if one may be unlimited."""
    highest = 0
    for value in limits.values():
        if value is None:
            continue
        if type(value) is not int or value > MAX_REQUEST_TOKENS:
            return None
        highest = max(highest, value)
    return highest or None


def _n(value: object) -> int:
    """Returns the body's `n`, at most `MAX_N`, or 1 if it is not a positive integer. vLLM reads 2.0 and "2" as 2."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return 1
    if isinstance(value, float):
        value = int(min(value, float(MAX_N))) if value.is_integer() else 1
    return min(value, MAX_N) if type(value) is int and value > 0 else 1


def is_true(value: object) -> bool:
    """Returns whether engines read the value of a boolean field as true. They read 1 and "yes" so, too (pydantic)."""
    return value.lower() in _TRUE if isinstance(value, str) else value == 1


def _is_utf8(body: bytes) -> bool:
    if body.isascii():
        return b"\x00" not in body[:4]  # UTF-16 and UTF-32 without a mark
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _describe_error(error: Exception, body: bytes) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply."
    lone = _HIGH_SURROGATE.search(body) if str(error) == _TRUNCATED and b"\\u" in body else None
    if lone is not None:  # the decoder says that the body ends there
        escape = lone.group(1).decode()
        return f"{escape} at byte {lone.start(1)} is one half of a character. Send both halves, such as \\ud83d\\ude00."
    return f"{str(error)[:200]}."
