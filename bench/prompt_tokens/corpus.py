"""A corpus of requests of sixteen kinds, made from a seed.

Problem: a gateway estimates tokens from bytes. How far it is off depends on the script, on JSON's escapes, on the
schemas of tools and on media, and no single text shows that.

Idea: each kind draws its lengths and words anew for every request, so that an estimate which fits one length only is
seen. Words are common ones of each language. Pictures and sound have real headers and sizes. Files have no kind: vLLM
refuses them.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

from plimsoll.gateway.api_routes import CHAT_ROUTE, ROUTES, ApiRoute

Message = dict[str, Any]

_WORDS: Final = {
    name: text.split() for name, text in json.loads(Path(__file__).with_name("words.json").read_text()).items()
}
_ENGLISH, _RUSSIAN, _CHINESE = _WORDS["english"], _WORDS["russian"], _WORDS["chinese"]
_HINDI, _ARABIC = _WORDS["hindi"], _WORDS["arabic"]
_CODE: Final = (
    "def {a}({b}, {c}):\n    if {b} is None:\n        return {c}\n    for index, item in enumerate({b}):\n"
    '        {a}_total += item["{c}"] * {n}\n    return {a}_total\n\n\n',
    "class {a}Handler(BaseHandler):\n    def __init__(self, {b}: int = {n}) -> None:\n        self._{b} = {b}\n\n",
    '    try:\n        {c} = await client.get(f"/api/{a}/{{{b}}}", timeout={n})\n    except ValueError as error:\n'
    '        logger.warning("{a} failed: %s", error)\n        raise\n\n',
)
_PICTURE_SIZES: Final = ((640, 480), (1024, 768), (1280, 720), (1920, 1080), (512, 512))
_VIDEO_SIZES: Final = ((640, 360), (640, 480))
_VECTOR_BYTES: Final = 2 * 2560  # of a token: as many numbers of 16 bits as Qwen3-4B has
_WORD_NAMES: Final = ("user", "order", "total", "config", "node", "cache", "request", "token", "batch", "path", "value")


@dataclass(frozen=True)
class CorpusRequest:
    """One request: its fields, and what no tokenizer of text counts.

    pictures, videos: width and height of each, in pixels. sound_s: seconds. given_tokens: length of a prompt of token
    IDs or vectors.
    """

    kind: str
    fields: Message
    escapes: bool = False
    pictures: tuple[tuple[int, int], ...] = ()
    videos: tuple[tuple[int, int], ...] = ()
    sound_s: float = 0.0
    given_tokens: int = 0
    route: ApiRoute = CHAT_ROUTE

    @property
    def body(self) -> bytes:
        """The request as a client sends it."""
        return json.dumps({"model": "m", **self.fields}, ensure_ascii=self.escapes).encode()


def make_corpus(per_kind: int, seed: int = 0) -> list[CorpusRequest]:
    """So many requests of each kind, in turns."""
    random = Random(seed)
    return [make(kind, random) for _ in range(per_kind) for kind, make in KINDS.items()]


def _sentences(words: list[str], count: int, random: Random, space: str = " ", stop: str = ". ") -> str:
    """About so many words; frequent words come first in the lists."""
    parts, left = [], count
    while left > 0:
        size = min(left, random.randint(5, 18))
        picked = [words[min(int(random.expovariate(3.0) * len(words)), len(words) - 1)] for _ in range(size)]
        parts.append(space.join(picked).capitalize())
        left -= size
    return stop.join(parts) + stop.strip()


def english(characters: int, random: Random) -> str:
    """English text of this length."""
    text = _sentences(_ENGLISH, characters // 2, random)
    return text[:characters]


def _size(random: Random, median: float) -> int:
    return max(5, round(random.lognormvariate(0.0, 0.8) * median))


def _chat(text: str | list[Message], system: str = "You are a helpful assistant.") -> list[Message]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _plain(kind: str, words: list[str], space: str, stop: str, escapes: bool) -> Callable[[str, Random], CorpusRequest]:
    def make(name: str, random: Random) -> CorpusRequest:
        text = _sentences(words, _size(random, 250), random, space, stop)
        return CorpusRequest(kind, {"messages": _chat(text)}, escapes)

    return make


def _history(kind: str, random: Random) -> CorpusRequest:
    messages = _chat(_sentences(_ENGLISH, 40, random))
    for turn in range(random.randint(4, 20)):
        role = ("assistant", "user")[turn % 2]
        messages.append({"role": role, "content": _sentences(_ENGLISH, _size(random, 60), random)})
    return CorpusRequest(kind, {"messages": messages})


def _code(kind: str, random: Random) -> CorpusRequest:
    def block() -> str:
        a, b, c = (random.choice(_WORD_NAMES) for _ in range(3))
        return random.choice(_CODE).format(a=a, b=b, c=c, n=random.randint(1, 4096))

    text = "Explain this code.\n\n" + "".join(block() for _ in range(_size(random, 12)))
    return CorpusRequest(kind, {"messages": _chat(text)})


def _mixed_scripts(kind: str, random: Random) -> CorpusRequest:
    texts = [
        _sentences(random.choice((_HINDI, _ARABIC, _RUSSIAN, _ENGLISH)), _size(random, 60), random) for _ in range(4)
    ]
    return CorpusRequest(kind, {"messages": _chat(" 😀 ".join(texts))})


def tool(random: Random) -> Message:
    """A tool with a schema of its parameters."""
    names = random.sample(_WORD_NAMES, 4)
    properties = {
        name: {"type": random.choice(("string", "integer")), "description": _sentences(_ENGLISH, 8, random)}
        for name in names
    }
    parameters = {"type": "object", "properties": properties, "required": names[:2]}
    function = {"name": "_".join(names[:2]), "description": _sentences(_ENGLISH, 20, random), "parameters": parameters}
    return {"type": "function", "function": function}


def _tools(kind: str, random: Random) -> CorpusRequest:
    tools = [tool(random) for _ in range(random.randint(2, 25))]
    return CorpusRequest(kind, {"messages": _chat(_sentences(_ENGLISH, _size(random, 60), random)), "tools": tools})


def _documents(kind: str, random: Random) -> CorpusRequest:
    rows = [
        f"| {random.choice(_WORD_NAMES)} | {random.randint(0, 99999)} | {random.random() * 100:.2f} % | 2026-0"
        f"{random.randint(1, 9)}-{random.randint(10, 28)} | {_sentences(_ENGLISH, 6, random)} |"
        for _ in range(_size(random, 25))
    ]
    return CorpusRequest(kind, {"messages": _chat("Which row is the largest?\n" + "\n".join(rows))})


def _response_format(kind: str, random: Random) -> CorpusRequest:
    """The engine is held to the schema, which is no part of the prompt."""
    rows = {name: tool(random)["function"]["parameters"] for name in random.sample(_WORD_NAMES, random.randint(1, 4))}
    schema = {"name": "answer", "schema": {"type": "object", "properties": rows}}
    text = _sentences(_ENGLISH, _size(random, 250), random)
    form = {"type": "json_schema", "json_schema": schema}
    return CorpusRequest(kind, {"messages": _chat(text), "response_format": form})


def _with_text(parts: list[Message], random: Random) -> list[Message]:
    text = {"type": "text", "text": _sentences(_ENGLISH, _size(random, 40), random)}
    return _chat([*parts, text])


def _pictures(kind: str, random: Random) -> CorpusRequest:
    sizes = tuple(random.choice(_PICTURE_SIZES) for _ in range(random.randint(1, 3)))
    parts = [{"type": "image_url", "image_url": {"url": _data_url("image/png", _png(*size))}} for size in sizes]
    return CorpusRequest(kind, {"messages": _with_text(parts, random)}, pictures=sizes)


def _picture_urls(kind: str, random: Random) -> CorpusRequest:
    sizes = tuple(random.choice(_PICTURE_SIZES) for _ in range(random.randint(1, 3)))
    urls = [f"https://pictures.example/{random.getrandbits(64):x}.png" for _ in sizes]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return CorpusRequest(kind, {"messages": _with_text(parts, random)}, pictures=sizes)


def _video(kind: str, random: Random) -> CorpusRequest:
    size = random.choice(_VIDEO_SIZES)
    data = _data_url("video/mp4", b"\0\0\0\x18ftypmp42" + bytes(random.randint(20_000, 200_000)))
    parts = [{"type": "video_url", "video_url": {"url": data}}]
    return CorpusRequest(kind, {"messages": _with_text(parts, random)}, videos=(size,))


def _sound(kind: str, random: Random) -> CorpusRequest:
    seconds = random.uniform(2.0, 20.0)
    data = base64.b64encode(b"RIFF0000WAVEfmt " + bytes(round(32_000 * seconds))).decode()
    parts = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}]
    return CorpusRequest(kind, {"messages": _with_text(parts, random)}, sound_s=seconds)


def _token_ids(kind: str, random: Random) -> CorpusRequest:
    count = _size(random, 500)
    return CorpusRequest(kind, {"prompt": [random.randint(0, 99_999) for _ in range(count)]}, given_tokens=count)


def _vectors(kind: str, random: Random) -> CorpusRequest:
    count = _size(random, 60)
    vectors = base64.b64encode(bytes(_VECTOR_BYTES * count)).decode()
    return CorpusRequest(kind, {"prompt_embeds": vectors}, given_tokens=count, route=ROUTES["/v1/completions"])


def _png(width: int, height: int) -> bytes:
    """A header, and bytes in the place of the picture's."""
    header = struct.pack(">II", width, height) + b"\x08\x02\x00\x00\x00"
    chunk = b"IHDR" + header
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + bytes(20_000)


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


KINDS: Final[dict[str, Callable[[str, Random], CorpusRequest]]] = {
    "English": _plain("English", _ENGLISH, " ", ". ", False),
    "history": _history,
    "code": _code,
    "Chinese": _plain("Chinese", _CHINESE, "", "。", False),
    "Chinese, escaped": _plain("Chinese, escaped", _CHINESE, "", "。", True),
    "Russian, escaped": _plain("Russian, escaped", _RUSSIAN, " ", ". ", True),
    "several scripts": _mixed_scripts,
    "tools": _tools,
    "tables": _documents,
    "response format": _response_format,
    "pictures": _pictures,
    "pictures behind URLs": _picture_urls,
    "video": _video,
    "sound": _sound,
    "token IDs": _token_ids,
    "vectors": _vectors,
}
