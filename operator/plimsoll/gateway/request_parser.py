"""Parse the body of a completion request: the fields that the gateway needs, or the reason for a rejection.

Problem: vLLM serves `model: null` with the model that it has loaded, accepts UTF-16, and uses the last of two equal
keys. The gateway rejects what vLLM would serve by mistake. It forwards what vLLM itself rejects, because vLLM's
message is more precise.

Idea: a typed decoder skips all but a few keys. Only `model` must have the right type; other keys with an unusable
value count as absent. Pictures and sound do not count by their base64 text (`media_parts`). A body of 200 kB costs
about 60 us.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES, MAX_REQUEST_TOKENS
from plimsoll.core.prompt_tokens import corrected_tokens
from plimsoll.core.routing.endpoint import Prompt
from plimsoll.core.types import MediaKind
from plimsoll.gateway.duplicate_keys import MESSAGES_KEY, PROMPT_KEY, find_duplicate, needs_strict_parse, strip_value
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.media_parts import BYTES_PER_TOKEN, MessageParts, split_media
from plimsoll.gateway.prefix_hash import BLOCK_BYTES, MAX_BLOCKS

LARGE_BODY_BYTES = 256 * 1024  # a strict parse of a larger body runs in a worker process
PREFIX_BYTES = BLOCK_BYTES * MAX_BLOCKS + 1  # bytes of a prompt that prefix hashing reads
MAX_SEQUENCES_PER_PROMPT = 16_384  # vLLM's limit on `n`
_TRUNCATED = "Input data was truncated"  # also said of a string that ends after a high surrogate
_HIGH_SURROGATE = re.compile(rb'(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})"')
_BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


class CompletionRequest(msgspec.Struct):
    """The parsed fields of one completion request. Treat it as immutable.

    `model` is the name that the client sent. `max_tokens` is the lower of the client's two output limits, None if it
    set neither. `stream` is true for server-sent events. `prompt_prefix` is the start of the prompt as raw JSON, with
    digests in the place of base64 text. `n` is the number of completions per prompt. `media_tokens` are those of
    `prompt.tokens` that are no text, by kind. `is_estimated` is false for a prompt of token IDs.
    """

    model: str
    prompt: Prompt
    max_tokens: int | None = None
    stream: bool = False
    prompt_prefix: bytes = b""
    n: int = 1
    media_tokens: Mapping[MediaKind, int] = {}
    is_estimated: bool = True

    def corrected_prompt(self, ratios: Mapping[str, float]) -> Prompt:
        """Returns the prompt with the learned ratio of each kind of content."""
        if not ratios or not self.is_estimated:
            return self.prompt
        tokens = round(corrected_tokens(self.prompt.tokens, self.media_tokens, ratios))
        return self.prompt._replace(tokens=min(tokens, MAX_REQUEST_TOKENS))


class _BodyFields(msgspec.Struct):
    model: object = None
    n: object = None
    max_tokens: object = None
    max_completion_tokens: object = None
    stream: object = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    functions: msgspec.Raw = msgspec.Raw()
    response_format: msgspec.Raw = msgspec.Raw()

    @property
    def schema_bytes(self) -> int:
        """The size of what a chat template adds to the messages."""
        return len(bytes(self.tools)) + len(bytes(self.functions)) + len(bytes(self.response_format))


_decode = msgspec.json.Decoder(_BodyFields).decode
_decode_prompt = msgspec.json.Decoder(object).decode


def needs_worker(body: bytes) -> bool:
    """Whether `parse_body` of this body would block the event loop for too long."""
    return len(body) > LARGE_BODY_BYTES and needs_strict_parse(body)


def parse_body(body: bytes) -> CompletionRequest | Rejection:
    """Returns the parsed request or its rejection. Never raises."""
    if body.startswith(_BYTE_ORDER_MARKS) or not _is_utf8(body):
        return Rejection(
            RejectionReason.INVALID_ENCODING, "The request body must be JSON in UTF-8 without a byte order mark."
        )
    try:
        fields = _decode(body)
        key, text = PROMPT_KEY, bytes(fields.prompt)
        if not text:
            key, text = MESSAGES_KEY, bytes(fields.messages)
        duplicate = find_duplicate(body) if needs_strict_parse(strip_value(body, key, text)) else None
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
    return _to_request(fields, key, text)


def _to_request(fields: _BodyFields, key: bytes, text: bytes) -> CompletionRequest | Rejection:
    """`text` is the raw JSON value of `key`, which holds the prompt."""
    model = fields.model
    if not isinstance(model, str) or not model:
        problem = "is missing" if model is None else "is empty" if model == "" else "must be a string"
        return Rejection(
            RejectionReason.MODEL_REQUIRED,
            f"The field 'model' {problem}. Set it to a model name from GET /v1/models.",
            param="model",
        )
    n = _n(fields.n)
    if n > MAX_SEQUENCES_PER_PROMPT:
        value = n if n < 10**12 else "10^12 or more"
        message = (
            f"The field 'n' is {value}: the limit is {MAX_SEQUENCES_PER_PROMPT} completions per prompt. Lower 'n'."
        )
        return Rejection(RejectionReason.REQUEST_TOO_LARGE, message, param="n")
    if key is MESSAGES_KEY:
        parts, is_ids = split_media(text, PREFIX_BYTES), False
        text_tokens = (parts.text_bytes + fields.schema_bytes) // BYTES_PER_TOKEN
        prompt = Prompt(text_tokens + sum(parts.media_tokens.values()), n)
    else:
        parts, prompt = MessageParts(text[:PREFIX_BYTES], len(text), {}), _prompt_size(n, text)
        is_ids = _is_token_ids(text)
    if prompt.tokens > MAX_REQUEST_TOKENS or prompt.sequences > MAX_REQUEST_SEQUENCES:
        prompt = Prompt(min(prompt.tokens, MAX_REQUEST_TOKENS), min(prompt.sequences, MAX_REQUEST_SEQUENCES))
    return CompletionRequest(
        model, prompt, _max_tokens(fields), fields.stream is True, parts.prefix, n, parts.media_tokens, not is_ids
    )


def _max_tokens(fields: _BodyFields) -> int | None:
    limits = fields.max_tokens, fields.max_completion_tokens
    if limits == (None, None):
        return None
    return min([m for m in limits if type(m) is int and 0 < m <= MAX_REQUEST_TOKENS], default=None)


def _n(value: object) -> int:
    """Returns the body's `n`, or 1 if it is not a positive integer. vLLM reads 2.0 as 2."""
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    return whole if type(whole) is int and whole > 0 else 1


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


def _prompt_size(n: int, text: bytes) -> Prompt:
    """Returns the tokens of one prompt of `prompt` and the number of sequences (`n` times prompts)."""
    if text[:1] != b"[":
        return Prompt(len(text) // BYTES_PER_TOKEN, n)
    if _is_token_ids(text):
        prompts = max(1, text.count(b"["))  # token IDs; a nested list means several prompts
        prompts = prompts - 1 if prompts > 1 else 1
        return Prompt((text.count(b",") + 1) // prompts, n * prompts)
    prompt_count = _count_prompts(text)
    return Prompt(len(text) // BYTES_PER_TOKEN // prompt_count, n * prompt_count)


def _is_token_ids(text: bytes) -> bool:
    return text[:1] == b"[" and text[:64].lstrip(b"[ \t\r\n")[:1].isdigit()


def _count_prompts(raw: bytes) -> int:
    try:
        decoded = _decode_prompt(raw)
    except (msgspec.DecodeError, RecursionError):
        return 1
    return max(1, len(decoded)) if isinstance(decoded, list) else 1
