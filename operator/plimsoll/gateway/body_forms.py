"""The size of the prompt in a request's body, by the form of the body.

Problem: each API has its own fields for a prompt: `messages`, `system`, `input`, `instructions`, `query` and
`documents`. Some of them hold a batch, each item of which is a sequence of its own in the engine.

Idea: one struct decodes only these fields, as raw JSON. Text counts by its bytes, media by their size
(`media_parts`), and token IDs by their number. Scores of pairs count each pair as one sequence of both texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from plimsoll.core.routing.endpoint import Prompt
from plimsoll.core.types import MediaKind
from plimsoll.gateway.api_routes import ApiRoute, BodyForm
from plimsoll.gateway.duplicate_keys import INPUT_KEY, MESSAGES_KEY, PROMPT_KEY
from plimsoll.gateway.errors import Rejection, RejectionReason
from plimsoll.gateway.media_parts import BYTES_PER_TOKEN, MessageParts, split_media, split_messages, utf8_bytes
from plimsoll.gateway.picture_tokens import Pictures
from plimsoll.gateway.prefix_hash import BLOCK_BYTES, MAX_BLOCKS

PREFIX_BYTES = BLOCK_BYTES * MAX_BLOCKS + 1  # bytes of a prompt that prefix hashing reads
EMBEDDED_TOKEN_BYTES: Final = 8192  # a vector of 4,096 numbers of 16 bits, as of an 8B; corrected like text
_ABSENT: Final = (b"", b"null")
_NO_TEXT: Final = (b"", b'""', b"[]", b"null")
CONTAINER: Final[list[object]] = []  # stands for a list or an object where a scalar belongs
_NO_TOOLS: Final = (b"[]", b"null")
STATE_FIELDS: Final = ("previous_response_id", "conversation", "background")  # of /v1/responses; need a store

_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
Scalar = bool | int | float | str | None
_decode_scalar = msgspec.json.Decoder(Scalar).decode


class CompletionFields(msgspec.Struct):
    """The fields of a chat or completion that decide about it. Those with text are raw JSON, empty if absent.

    A list or an object in the place of a scalar is `CONTAINER`: a million numbers would take the decoder seconds.
    """

    model: Scalar = None
    n: Scalar = None
    max_tokens: Scalar = None
    max_completion_tokens: Scalar = None
    stream: Scalar = None
    prompt: msgspec.Raw = msgspec.Raw()
    prompt_embeds: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    functions: msgspec.Raw = msgspec.Raw()
    response_format: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    chat_template: msgspec.Raw = msgspec.Raw()
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()

    @property
    def template_bytes(self) -> int:
        """The size of what a chat template may write into the prompt and is neither message nor tool."""
        others = self.functions, self.documents, self.chat_template, self.chat_template_kwargs
        return sum(utf8_bytes(bytes(raw)) for raw in others if raw)

    @property
    def schema_bytes(self) -> int:
        """The size of the schema that the response must have."""
        return utf8_bytes(bytes(self.response_format)) if self.response_format else 0


class BodyFields(CompletionFields):
    """The same of all other forms. Chats are most of all requests, and each field costs them time."""

    max_output_tokens: Scalar = None
    previous_response_id: Scalar = None
    conversation: Scalar = None
    background: Scalar = None
    system: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    queries: msgspec.Raw = msgspec.Raw()
    items: msgspec.Raw = msgspec.Raw()
    text_1: msgspec.Raw = msgspec.Raw()
    text_2: msgspec.Raw = msgspec.Raw()
    data_1: msgspec.Raw = msgspec.Raw()
    data_2: msgspec.Raw = msgspec.Raw()

    @property
    def schema_bytes(self) -> int:
        """The same, also of the form in which /v1/responses has it."""
        return super().schema_bytes + utf8_bytes(bytes(self.text))


_decode_completion = msgspec.json.Decoder(CompletionFields).decode
_decode_other = msgspec.json.Decoder(BodyFields).decode


def decode_fields(body: bytes, form: BodyForm) -> CompletionFields:
    """Returns the fields of a body. Raises msgspec.DecodeError, ValueError or RecursionError."""
    decode = _decode_completion if form is BodyForm.COMPLETION else _decode_other
    try:
        return decode(body)
    except msgspec.ValidationError:  # a scalar field holds a list or an object, or the body is no object
        return _without_containers(
            _decode_object(body), CompletionFields if form is BodyForm.COMPLETION else BodyFields
        )


def _without_containers(raw: Mapping[str, msgspec.Raw], form: type[CompletionFields]) -> CompletionFields:
    """Returns the fields of a body. Raises msgspec.DecodeError."""
    fields: dict[str, object] = {}
    for field in msgspec.structs.fields(form):
        if (value := raw.get(field.name)) is not None:
            text = bytes(value)
            is_scalar = field.type is not msgspec.Raw
            fields[field.name] = (
                value if not is_scalar else CONTAINER if text[:1] in (b"[", b"{") else _decode_scalar(text)
            )
    return form(**fields)  # type: ignore[arg-type]


class PromptSize(msgspec.Struct):
    """The prompt of one request.

    `prompt` has the tokens of one sequence and the number of sequences. `field` names the field that holds the batch.
    For `prefix`, `media_tokens`, `is_estimated` and `pictures` see `ParsedRequest`; `media_tokens` are those of one
    sequence.
    """

    prompt: Prompt
    prefix: bytes = b""
    media_tokens: Mapping[MediaKind, int] = {}
    field: str = "prompt"
    is_estimated: bool = True
    pictures: Pictures = Pictures()


def main_value(fields: CompletionFields, form: BodyForm) -> tuple[bytes, bytes]:
    """Returns the quoted key of the field that is most of a body of this form, and its raw value, empty if absent."""
    if isinstance(fields, BodyFields) and (text := bytes(fields.input)):
        return INPUT_KEY, text
    if form is BodyForm.COMPLETION and (text := bytes(fields.prompt)):
        return PROMPT_KEY, text
    return MESSAGES_KEY, bytes(fields.messages)


def prompt_size(fields: CompletionFields, route: ApiRoute, n: int) -> PromptSize:
    """Returns the size of the prompt; `n` is the number of completions per prompt."""
    return _SIZES[route.form](fields) if isinstance(fields, BodyFields) else _completion(fields, n, route.is_chat)


def rejected_field(fields: CompletionFields, form: BodyForm) -> Rejection | None:
    """Returns the rejection of a request that needs state which no engine keeps."""
    if form is not BodyForm.RESPONSES:
        return None
    for name in STATE_FIELDS:
        if getattr(fields, name) not in (None, False):
            message = (
                f"The field '{name}' is not supported: this gateway stores no responses. Send the whole conversation in"
                f" 'input', without '{name}'."
            )
            return Rejection(RejectionReason.UNSUPPORTED_FIELD, message, param=name)
    return None


def _completion(fields: CompletionFields, n: int, is_chat: bool) -> PromptSize:
    messages, text, embeds = bytes(fields.messages), bytes(fields.prompt), bytes(fields.prompt_embeds)
    has_messages, has_embeds = messages not in _ABSENT, embeds not in _ABSENT
    if (is_chat and has_messages) or not (text or has_embeds):  # engines ignore the prompt of a chat with messages
        return _conversation(fields, split_messages(messages, PREFIX_BYTES), n)
    if has_embeds:
        return _with_embeds(text, embeds, n)
    return PromptSize(_list_size(n, text), text[:PREFIX_BYTES], is_estimated=not _is_token_ids(text))


def _with_embeds(text: bytes, embeds: bytes, n: int) -> PromptSize:
    """Returns the size of prompts given as vectors (base64 of a tensor each), and of the texts with them."""
    count = _count_items(embeds)
    tokens = len(embeds) * 3 // 4 // EMBEDDED_TOKEN_BYTES
    if text not in _NO_TEXT:
        texts = _list_size(1, text)
        count, tokens = count + texts.sequences, tokens + texts.tokens * texts.sequences
    return PromptSize(Prompt(tokens // count, n * count), b"" if text in _NO_TEXT else text[:PREFIX_BYTES])


def _messages(fields: BodyFields) -> PromptSize:
    parts = split_media(bytes(fields.system) + bytes(fields.messages), PREFIX_BYTES)
    return _conversation(fields, parts, 1)


def _responses(fields: BodyFields) -> PromptSize:
    parts = split_media(bytes(fields.instructions) + bytes(fields.input), PREFIX_BYTES)
    return _conversation(fields, parts, 1)


def _embedding(fields: BodyFields) -> PromptSize:
    inputs, messages = bytes(fields.input), bytes(fields.messages)
    is_chat = len(messages) > len(inputs)  # of a body with both, an engine may read either
    text, field = (messages, "messages") if is_chat else (inputs, "input")
    if _is_token_ids(text):
        return PromptSize(_list_size(1, text), text[:PREFIX_BYTES], field=field, is_estimated=False)
    count = 1 if _is_conversation(text) else _count_items(text)
    parts = split_media(text, PREFIX_BYTES)
    media = {kind: tokens // count for kind, tokens in parts.media_tokens.items()}
    tokens = parts.text_bytes // BYTES_PER_TOKEN // count + sum(media.values())
    pictures = parts.pictures if count == 1 else Pictures()  # tokens of several are a mean
    return PromptSize(Prompt(tokens, count), parts.prefix, media, field, pictures=pictures)


def _scoring(fields: BodyFields) -> PromptSize:
    """Of pairs: one text with each of the others, or two lists of one length.

    Each side has several names, of which an engine reads one. All of them count, whichever that is.
    """
    firsts = [raw for raw in map(bytes, (fields.query, fields.queries, fields.text_1, fields.data_1)) if raw]
    seconds = {name: bytes(getattr(fields, name)) for name in ("documents", "items", "text_2", "data_2")}
    items = {name: _count_items(raw) for name, raw in seconds.items() if raw}
    counts = [(raw, _count_items(raw)) for raw in firsts] + [(seconds[name], count) for name, count in items.items()]
    pairs, tokens = max((count for _, count in counts), default=1), 0.0
    media: dict[MediaKind, int] = {}
    for text, count in counts:
        parts = split_media(text, 0)
        tokens += parts.text_bytes / BYTES_PER_TOKEN / count
        for kind, amount in parts.media_tokens.items():
            media[kind] = media.get(kind, 0) + amount // count
    field = max(items, key=items.__getitem__, default="documents")
    prefix = firsts[0][:PREFIX_BYTES] if firsts else b""
    return PromptSize(Prompt(int(tokens) + sum(media.values()), pairs), prefix, media, field)


def _nothing(fields: BodyFields) -> PromptSize:
    return PromptSize(Prompt(0, 1))


_SIZES: Final[Mapping[BodyForm, Callable[[BodyFields], PromptSize]]] = {
    BodyForm.MESSAGES: _messages,
    BodyForm.RESPONSES: _responses,
    BodyForm.EMBEDDING: _embedding,
    BodyForm.SCORING: _scoring,
    BodyForm.TOKENS: _nothing,
}


def _conversation(fields: CompletionFields, parts: MessageParts, n: int) -> PromptSize:
    """Returns the size of messages and tools. A chat template writes tools first, so the prefix begins with them."""
    tools, prefix, text_bytes = bytes(fields.tools), parts.prefix, parts.text_bytes + fields.template_bytes
    media = parts.media_tokens
    if schema_tokens := fields.schema_bytes // BYTES_PER_TOKEN:
        media = {**media, MediaKind.SCHEMA: schema_tokens}
    if tools:
        text_bytes += utf8_bytes(tools)
        prefix = prefix if tools in _NO_TOOLS else (tools[:PREFIX_BYTES] + prefix)[:PREFIX_BYTES]
    tokens = text_bytes // BYTES_PER_TOKEN + sum(media.values())
    return PromptSize(Prompt(tokens, n), prefix, media, pictures=parts.pictures)


def _list_size(n: int, text: bytes) -> Prompt:
    """Returns the tokens of one prompt of a list and the number of sequences (`n` times prompts)."""
    if text[:1] != b"[":
        return Prompt(utf8_bytes(text) // BYTES_PER_TOKEN, n)
    if _is_token_ids(text):
        prompts = max(1, text.count(b"["))  # token IDs; a nested list means several prompts
        prompts = prompts - 1 if prompts > 1 else 1
        return Prompt((text.count(b",") + 1) // prompts, n * prompts)
    prompt_count = _count_items(text)
    return Prompt(utf8_bytes(text) // BYTES_PER_TOKEN // prompt_count, n * prompt_count)


def _is_token_ids(text: bytes) -> bool:
    return text[:1] == b"[" and text[:64].lstrip(b"[ \t\r\n")[:1].isdigit()


def _is_conversation(text: bytes) -> bool:
    """Whether a list has messages and not texts, so that it is one sequence."""
    return text[:1] == b"[" and text[1:64].lstrip(b" \t\r\n")[:1] == b"{"


def _count_items(raw: bytes) -> int:
    """Returns the length of a list, at least 1, and 1 for any other value."""
    if raw[:1] != b"[":
        return 1
    try:
        return max(1, len(_decode_items(raw)))
    except (msgspec.DecodeError, RecursionError):
        return 1
