"""The APIs of models that embed, score and transcribe, those about tokens, and the paths of every engine.

An embedding and a score are sequences of one token, whose prompts decide the numbers. An engine with the pooling runner
has the paths of POOLING, any other those of GENERATION; an engine of vLLM has the audio paths only if its model can
transcribe.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from plimsoll.engines import form_data
from simulated import dialects, protocol, responses, token_text
from simulated.dialects import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    MESSAGES_PATH,
    Dialect,
    Names,
    Sequences,
    block_text,
    document_of,
    messages_chat,
)
from simulated.protocol import GenerationRequest
from simulated.sequence import ServedSequence

TOKEN_PATHS: Final = ("/tokenize", "/detokenize", f"{MESSAGES_PATH}/count_tokens")
RERANK_PATHS: Final = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE_PATHS: Final = ("/score", "/v1/score")
AUDIO_PATHS: Final = ("/v1/audio/transcriptions", "/v1/audio/translations")
EMBEDDING_SIZE: Final = 8
CLIP_SECONDS: Final = 30
AUDIO_BYTES_PER_SECOND: Final = 25_000
WORDS_PER_CLIP: Final = 20
_DECODER_PROMPT: Final = (50258, 50259, 50359, 50363)  # start, language, task, no time stamps


# Embeddings and scores: sequences of one token


def _pooling_request(document: Mapping[str, Any], prompts: list[Any], names: Names, context: int) -> GenerationRequest:
    body = json.dumps({"model": document.get("model"), "prompt": prompts, "max_tokens": 1}).encode()
    return protocol.parse_request(body, False, names, context)


def _parse_embedding(body: bytes, names: Names, context: int) -> GenerationRequest:
    document = document_of(body)
    given = document.get("input")
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not given:
        raise protocol.invalid_request("input: Field required", "input")
    encoding = "base64" if document.get("encoding_format") == "base64" else "float"
    return replace(_pooling_request(document, given, names, context), encoding=encoding)


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [one if isinstance(one, str) else block_text(one.get("content")) for one in values if one is not None]


def _parse_pairs(first: tuple[str, ...], second: tuple[str, ...]) -> Callable[[bytes, Names, int], GenerationRequest]:
    def parse(body: bytes, names: Names, context: int) -> GenerationRequest:
        document = document_of(body)
        lefts = _texts(next((document[key] for key in first if key in document), None))
        rights = _texts(next((document[key] for key in second if key in document), None))
        if not lefts or not rights or len(lefts) not in (1, len(rights)):
            raise protocol.invalid_request("Input lengths must be either 1:1, 1:N or N:N")
        lefts = lefts * len(rights) if len(lefts) == 1 else lefts
        pairs = [f"{left} {right}" for left, right in zip(lefts, rights, strict=True)]
        return _pooling_request(document, pairs, names, context)

    return parse


def _vector(sequence: ServedSequence) -> list[float]:
    return [((sequence.seed >> 4 * place) % 16 - 7.5) / 16 for place in range(EMBEDDING_SIZE)]


def _score(sequence: ServedSequence) -> float:
    return sequence.seed % 1000 / 1000


def _pooling_usage(sequences: Sequences) -> dict[str, Any]:
    return responses.usage_document(sum(sequence.prompt_tokens for sequence in sequences), 0)


def _encoded(vector: list[float], encoding: str) -> list[float] | str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if encoding == "base64" else vector


def _complete_embedding(
    request: GenerationRequest, name: str, created: int, sequences: Sequences, transfer: Any
) -> bytes:
    data = [
        {"index": index, "object": "embedding", "embedding": _encoded(_vector(sequence), request.encoding)}
        for index, sequence in enumerate(sequences)
    ]
    head = {"id": name, "object": "list", "created": created, "model": request.model}
    return responses.to_json({**head, "data": data, "usage": _pooling_usage(sequences)})


def _complete_score(request: GenerationRequest, name: str, created: int, sequences: Sequences, transfer: Any) -> bytes:
    data = [{"index": index, "object": "score", "score": _score(one)} for index, one in enumerate(sequences)]
    head = {"id": name, "object": "list", "created": created, "model": request.model}
    return responses.to_json({**head, "data": data, "usage": _pooling_usage(sequences)})


def _complete_rerank(request: GenerationRequest, name: str, created: int, sequences: Sequences, transfer: Any) -> bytes:
    ranked = sorted(enumerate(sequences), key=lambda item: -_score(item[1]))
    results = [
        {"index": index, "document": {"text": None}, "relevance_score": _score(sequence)} for index, sequence in ranked
    ]
    tokens = sum(sequence.prompt_tokens for sequence in sequences)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return responses.to_json({"id": name, "model": request.model, "usage": usage, "results": results})


# Sound: a form, cut into clips of 30 seconds


def _parse_audio(body: bytes, names: Names, context: int) -> GenerationRequest:
    """Return the request. `body` begins with the boundary, the only part of the content type that a form's parser
    needs.
    """
    boundary = body[2:].partition(b"\r\n")[0].decode("latin-1")
    try:
        fields = form_data.parse_form(body, f'multipart/form-data; boundary="{boundary}"')
    except form_data.FormError as error:
        raise protocol.invalid_request(f"There was an error parsing the body: {error}") from None
    values = {field.name: body[field.start : field.end] for field in fields}
    if "file" not in values:
        raise protocol.invalid_request("file: Field required", "file")
    clips = max(1, -(-len(values["file"]) // (AUDIO_BYTES_PER_SECOND * CLIP_SECONDS)))
    document = {
        "model": values.get("model", b"").decode("utf-8", "replace"),
        "prompt": [list(_DECODER_PROMPT)] * clips,
        "max_tokens": WORDS_PER_CLIP,
    }
    request = protocol.parse_request(json.dumps(document).encode(), False, names, context)
    return replace(request, stream=values.get("stream", b"").strip().lower() in (b"true", b"1"))


def _complete_transcription(
    request: GenerationRequest, name: str, created: int, sequences: Sequences, transfer: Any
) -> bytes:
    text = "".join(sequence.text(0, sequence.emitted_tokens) for sequence in sequences)
    return responses.to_json({"text": text, "usage": {"type": "duration", "seconds": CLIP_SECONDS * len(sequences)}})


class _TranscriptStream:
    """The events of one streamed text: words of one clip after another, as vLLM sends them."""

    def __init__(
        self, request: GenerationRequest, name: str, created: int, sequences: Sequences, kind: str = "transcription"
    ) -> None:
        self._head = {"id": name, "object": f"{kind}.chunk", "created": created, "model": request.model}
        self._sequences = sequences
        self._clip = self._place = 0

    def new_events(self) -> bytes:
        """Return the events since the last call."""
        events = b""
        while self._clip < len(self._sequences):
            sequence = self._sequences[self._clip]
            for place in range(self._place, sequence.emitted_tokens):
                events += self._event({"delta": {"content": token_text.word(sequence.seed, place)}})
            self._place = sequence.emitted_tokens
            if sequence.outcome is None:
                break
            self._clip, self._place = self._clip + 1, 0
        return events

    def final_events(self) -> bytes:
        """Return the events after the last token."""
        return (
            self._event({"delta": {"content": ""}, "finish_reason": "stop", "stop_reason": None}) + responses.DONE_EVENT
        )

    def _event(self, choice: dict[str, Any]) -> bytes:
        return responses.to_event({**self._head, "choices": [choice]})


# Tokens, without the engine


def tokens_response(path: str, body: bytes, names: Names, context: int) -> bytes:
    """Return the response of a path of TOKEN_PATHS; raises RequestError."""
    document = document_of(body)
    if path == "/detokenize":
        ids = document.get("tokens")
        if not isinstance(ids, list):
            raise protocol.invalid_request("tokens: Field required", "tokens")
        text = token_text.encode_ids(ids).rstrip(b"\0").decode("utf-8", "replace")
        return responses.to_json({"prompt": text})
    chat = path.startswith(MESSAGES_PATH)
    found = messages_chat(document) if chat or "messages" in document else document
    prompt_fields = {key: found.get(key) for key in ("model", "messages", "prompt") if found.get(key) is not None}
    request = protocol.parse_request(json.dumps(prompt_fields).encode(), "messages" in prompt_fields, names, context)
    (prompt,) = request.prompts
    count = token_text.count_tokens(prompt)
    if chat:
        return responses.to_json({"input_tokens": count})
    ids = [number for (number,) in struct.iter_unpack("=I", prompt)]
    return responses.to_json({"count": count, "max_model_len": context, "tokens": ids, "token_strs": None})


def _of_protocol(chat: bool) -> Callable[[bytes, Names, int], GenerationRequest]:
    return lambda body, names, context: protocol.parse_request(body, chat, names, context)


GENERATION: Final[Mapping[str, Dialect]] = {
    COMPLETIONS_PATH: Dialect("cmpl", _of_protocol(False), responses.complete_response),
    CHAT_PATH: Dialect("chatcmpl", _of_protocol(True), responses.complete_response),
    **dialects.GENERATION,
    AUDIO_PATHS[0]: Dialect("trsc", _parse_audio, _complete_transcription, _TranscriptStream),
    AUDIO_PATHS[1]: Dialect(
        "trsl", _parse_audio, _complete_transcription, partial(_TranscriptStream, kind="translation")
    ),
}
POOLING: Final[Mapping[str, Dialect]] = {
    "/v1/embeddings": Dialect("embd", _parse_embedding, _complete_embedding),
    **dict.fromkeys(RERANK_PATHS, Dialect("rerank", _parse_pairs(("query",), ("documents",)), _complete_rerank)),
    **dict.fromkeys(
        SCORE_PATHS,
        Dialect(
            "score",
            _parse_pairs(("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")),
            _complete_score,
        ),
    ),
}
