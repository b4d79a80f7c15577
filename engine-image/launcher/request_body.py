"""Request bodies: read completely within a limit, without transfer parameters, and extended without being rewritten.

Problem: a client could name any host and any tenant's blocks in `kv_transfer_params`, and a body can be of any length.
Parsing and writing each body again would cost time and change its content. Idea: bytes are searched first; only a body
that may contain the key is parsed. Fields are added as text before the last brace: of two equal keys JSON readers,
vLLM's included, take the last.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from launcher.asgi import Message, Receive
from launcher.form_data import FormError, parse_form

TRANSFER_PARAMS_KEY = "kv_transfer_params"
EXTRA_ARGUMENTS_KEY = "vllm_xargs"  # vLLM reads transfer parameters from it, too, of any type
CACHE_SALT_KEY = "cache_salt"
PRIORITY_KEY = "priority"
# What may be a list of prompts: in completions, embeddings, rerank and score, where each is a pair with the query.
BATCH_FIELDS = ("prompt", "input", "documents", "items", "text_2", "data_2")


class TooLarge(Exception):
    """The body is longer than the limit."""


class ClientGone(Exception):
    """The client closed its connection."""


async def read(receive: Receive, limit: int) -> bytes:
    """Return the whole body; raises TooLarge beyond `limit` bytes and ClientGone."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise TooLarge
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the body once and then the connection's further messages (its end)."""
    pending = True

    async def replayed() -> Message:
        nonlocal pending
        if pending:
            pending = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replayed


def parse(body: bytes) -> Any:
    """Return the JSON document as the engine will read it; None if it is invalid, which the engine then reports."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def sequences(body: bytes) -> tuple[int, int, str]:
    """Return the outputs per prompt (`n`), the number of prompts, and the field that has them.

    1, 1 and `prompt` if the body has none. A list of token ids is one prompt, and so is a list of messages.
    """
    document = parse(body)
    if not isinstance(document, dict):
        return 1, 1, BATCH_FIELDS[0]
    n = document.get("n")
    if isinstance(n, float) and n.is_integer():  # vLLM reads 2.0 as 2
        n = int(n)
    field = max(BATCH_FIELDS, key=lambda name: _items(document.get(name)))  # the first of equal ones
    prompts = max(1, _items(document.get(field)))
    return n if type(n) is int and n > 0 else 1, prompts, field


def _items(found: Any) -> int:
    return len(found) if isinstance(found, list) and found and isinstance(found[0], str | list) else 0


def strip_transfer_params(body: bytes, nested: bool) -> bytes:
    """Return the body without transfer parameters; the same object if it has none.

    nested: remove them at any depth, for routes whose bodies nest (batches, rendered requests). In completions and chat
    requests only the top level and vLLM's extra arguments count; another field may be a user's own, in a tool's schema.
    """
    if not _may_hold(body, TRANSFER_PARAMS_KEY):
        return body
    document = parse(body)
    if nested:
        changed = _strip_deep(document)
    else:
        changed = _strip(document)
        changed = (isinstance(document, dict) and _strip(document.get(EXTRA_ARGUMENTS_KEY))) or changed
    return json.dumps(document).encode() if changed else body


def _strip(value: Any) -> bool:
    return isinstance(value, dict) and value.pop(TRANSFER_PARAMS_KEY, value) is not value


def _may_hold(body: bytes, key: str) -> bool:
    """Whether the body may contain the key: in plain letters, with an escaped one, or in UTF-16 or
    UTF-32 (zero bytes).
    """
    return key.encode() in body or b"\\u" in body or b"\0" in body


def _strip_deep(document: Any) -> bool:
    changed = False
    pending = [document]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            changed = _strip(value) or changed
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
    return changed


def rewrite_model(body: bytes, model: str) -> tuple[bytes, str]:
    """Return the body with `model` as its model, and the previous name; unchanged for an empty `model`.

    A body whose model is no string is unchanged, so that the engine rejects it with its own message; the name is "".
    """
    document = parse(body)
    requested = document.get("model") if isinstance(document, dict) else None
    if not isinstance(requested, str):
        return body, ""
    return (add_fields(body, {"model": model}) if model and model != requested else body), requested


def rewrite_form_model(body: bytes, content_type: str, model: str) -> tuple[bytes, str]:
    """The same for a multipart form, whose field `model` has the name; a body that is no form is unchanged."""
    try:
        fields = [field for field in parse_form(body, content_type) if field.name == "model"]
    except FormError:
        return body, ""
    if len(fields) != 1 or fields[0].is_file:
        return body, ""
    start, end = fields[0].start, fields[0].end
    requested = body[start:end].decode("utf-8", "replace")
    return (body[:start] + model.encode() + body[end:] if model and model != requested else body), requested


def with_cache_salt(body: bytes, salt: str) -> bytes:
    """Return the body with a tenant's salt for the prefix cache; the same object if it is no JSON object.

    A client's own salt divides the tenant's blocks further.
    """
    document = parse(body)
    if not isinstance(document, dict):
        return body
    own = document.get(CACHE_SALT_KEY)
    if isinstance(own, str) and own:
        salt = hashlib.sha256(f"{salt} {own}".encode(errors="surrogatepass")).hexdigest()
    return add_fields(body, {CACHE_SALT_KEY: salt})


def with_priority(body: bytes, priority: int) -> bytes:
    """Return the body with its priority in the engine, lowest first; the same object if it is no JSON object."""
    return add_fields(body, {PRIORITY_KEY: priority}) if isinstance(parse(body), dict) else body


def without_priority(body: bytes) -> bytes:
    """Return the body with the usual priority instead of the client's own; the same object if it states none."""
    if not _may_hold(body, PRIORITY_KEY):
        return body
    document = parse(body)
    return add_fields(body, {PRIORITY_KEY: 0}) if isinstance(document, dict) and PRIORITY_KEY in document else body


def add_fields(body: bytes, fields: dict[str, Any]) -> bytes:
    """Return a JSON object's text with fields added or overridden; `body` must have parsed to an object."""
    if b"\0" in body:  # UTF-16 or UTF-32
        body = json.dumps(json.loads(body)).encode()
    head = body.rstrip()[:-1].rstrip()
    comma = b"" if head.endswith(b"{") else b","
    return head + comma + json.dumps(fields).encode()[1:]
