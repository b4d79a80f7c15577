"""A completion request's body: what the gateway must know of it, or why it is refused.

Problem: vLLM answers `model: null` from whatever it has loaded, reads UTF-16, and takes the last of two equal keys.
What it would serve without knowing better is refused here; what it would refuse itself, in better words, is left to
it.

Idea: a typed decoder skips all but a handful of keys, and only `model` must have a type; the other keys are read as far
as they make sense. Two hundred kilobytes cost some 60 us.
"""

from __future__ import annotations

import msgspec

from plimsoll.core.admission.outcome import MOST_SEQUENCES, MOST_TOKENS
from plimsoll.core.picking.endpoint import Prompt
from plimsoll.gateway.keys import MESSAGES, PROMPT, repeated, suspicious, without
from plimsoll.gateway.prefix import BLOCK_BYTES, MOST_BLOCKS
from plimsoll.gateway.replies import Reason, Refusal

LARGE = 256 * 1024  # bytes; a slow parse of more than this runs in a worker process
BYTES_PER_TOKEN = 4
BEGINNING = BLOCK_BYTES * MOST_BLOCKS + 1  # bytes of a prompt by which it is known again
MOST_ANSWERS = 16_384  # of one prompt: vLLM's own limit on `n`
_BOMS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")


class Request(msgspec.Struct):
    """What one completion request asks for, not to be changed. model is the name the client used.

    max_tokens: the lesser of the limits that it sets on one answer, None without. stream: the answer comes in events.
    beginning: of its prompt, as raw JSON. n: answers to each prompt.
    """

    model: str
    prompt: Prompt
    max_tokens: int | None = None
    stream: bool = False
    beginning: bytes = b""
    n: int = 1


class _Body(msgspec.Struct):
    model: object = None
    n: object = None
    max_tokens: object = None
    max_completion_tokens: object = None
    stream: object = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Body).decode
_decode_prompt = msgspec.json.Decoder(object).decode


def needs_worker(body: bytes) -> bool:
    """Is this body one whose `classify` would keep all others waiting?"""
    return len(body) > LARGE and suspicious(body)


def classify(body: bytes) -> Request | Refusal:
    """Read one body. Never raises."""
    if body.startswith(_BOMS) or not _is_utf8(body):
        return Refusal(Reason.INVALID_ENCODING, "The request body must be JSON in UTF-8, without a byte order mark.")
    try:
        fields = _decode(body)
        key, text = PROMPT, bytes(fields.prompt)
        if not text:
            key, text = MESSAGES, bytes(fields.messages)
        twice = repeated(body) if suspicious(without(body, key, text)) else None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        return Refusal(Reason.INVALID_JSON, f"The request body is not a JSON object that can be read: {_words(error)}")
    if twice is not None:
        return Refusal(Reason.DUPLICATE_KEY, f"The request body has the key '{twice}' more than once.", param=twice)
    return _request(fields, key, text)


def _request(fields: _Body, key: bytes, text: bytes) -> Request | Refusal:
    """text: the raw JSON of the key that holds the prompt."""
    model = fields.model
    if not isinstance(model, str) or not model:
        said = "is missing" if model is None else "is empty" if model == "" else "must be a string"
        return Refusal(Reason.MODEL_REQUIRED, f"The field 'model' {said}: name the model to use.", param="model")
    n = _n(fields.n)
    if n > MOST_ANSWERS:
        value = n if n < 10**12 else "10^12 or more"
        words = f"The field 'n' is {value}: the limit is {MOST_ANSWERS} answers to one prompt. Lower 'n'."
        return Refusal(Reason.REQUEST_TOO_LARGE, words, param="n")
    prompt = _prompt(n, key, text)
    if prompt.tokens > MOST_TOKENS or prompt.sequences > MOST_SEQUENCES:
        prompt = Prompt(min(prompt.tokens, MOST_TOKENS), min(prompt.sequences, MOST_SEQUENCES))
    return Request(model, prompt, _max_tokens(fields), fields.stream is True, text[:BEGINNING], n)


def _max_tokens(fields: _Body) -> int | None:
    told = fields.max_tokens, fields.max_completion_tokens
    if told == (None, None):
        return None
    return min([m for m in told if type(m) is int and 0 < m <= MOST_TOKENS], default=None)


def _n(told: object) -> int:
    """The body's `n`; 1 for what an engine does not take for a count of at least 1. vLLM reads 2.0 as 2."""
    whole = int(told) if isinstance(told, float) and told.is_integer() else told
    return whole if type(whole) is int and whole > 0 else 1


def _is_utf8(body: bytes) -> bool:
    if body.isascii():
        return b"\x00" not in body[:4]  # UTF-16 and UTF-32 without a mark
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _words(error: Exception) -> str:
    return "it is nested too deep." if isinstance(error, RecursionError) else f"{str(error)[:200]}."


def _prompt(n: int, key: bytes, text: bytes) -> Prompt:
    """Tokens of the first sequence and the number of sequences: `n` times prompts."""
    if key is MESSAGES or text[:1] != b"[":
        return Prompt(len(text) // BYTES_PER_TOKEN, n)
    if text.lstrip(b"[ \t\r\n")[:1].isdigit():
        prompts = max(1, text.count(b"["))  # tokens as numbers; nested means several prompts
        prompts = prompts - 1 if prompts > 1 else 1
        return Prompt((text.count(b",") + 1) // prompts, n * prompts)
    texts = _texts(text)
    return Prompt(len(text) // BYTES_PER_TOKEN // texts, n * texts)


def _texts(raw: bytes) -> int:
    try:
        decoded = _decode_prompt(raw)
    except (msgspec.DecodeError, RecursionError):
        return 1
    return max(1, len(decoded)) if isinstance(decoded, list) else 1
