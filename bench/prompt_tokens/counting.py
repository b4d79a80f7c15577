"""Prompt tokens as an engine counts them: a chat template, a real tokenizer, and a model family's rule for media.

The tokenizers are those that the LiteLLM package carries: cl100k (whose splits and merges Llama 3 and Qwen build on),
o200k (gpt-oss) and Anthropic's. Pictures have the tokens of their family's rule (`plimsoll.gateway.picture_tokens`),
and sound has Qwen2-Audio's 25 per second. A video has those of 16 pictures: vLLM samples 32 frames of any, and Qwen2-VL
takes two together.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.prompt_tokens.corpus import CorpusRequest, Message
from plimsoll.gateway.picture_tokens import PictureFamily, PictureRule

Count = Callable[[str], int]
SOUND_TOKENS_PER_S: Final = 25.0
VIDEO_PICTURES: Final = 16
_TOOLS_PREAMBLE: Final = "# Tools\n\nYou may call one or more functions to assist with the user query.\n"


def load_tokenizers() -> dict[str, Count]:
    """Each tokenizer by its name, as a function from text to its number of tokens."""
    spec = importlib.util.find_spec("litellm")
    assert spec is not None, "install requirements/clients.txt"
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "litellm_core_utils" / "tokenizers"
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)  # so that tiktoken downloads nothing
    import tiktoken
    from tokenizers import Tokenizer

    def byte_pairs(name: str) -> Count:
        encoding = tiktoken.get_encoding(name)
        return lambda text: len(encoding.encode(text, disallowed_special=()))

    anthropic = Tokenizer.from_file(str(folder / "anthropic_tokenizer.json"))
    return {
        "cl100k": byte_pairs("cl100k_base"),
        "o200k": byte_pairs("o200k_base"),
        "anthropic": lambda text: len(anthropic.encode(text).ids),
    }


def prompt_tokens(request: CorpusRequest, count: Count, family: PictureFamily) -> int:
    """Prompt tokens of a request."""
    if request.given_tokens:
        return request.given_tokens
    sizes = request.pictures + VIDEO_PICTURES * request.videos
    pictures = sum(PictureRule(family).tokens(*size) for size in sizes)
    return count(_rendered(request.fields)) + pictures + round(SOUND_TOKENS_PER_S * request.sound_s)


def _rendered(fields: Message) -> str:
    """ChatML, with tools where Qwen's template writes them."""
    text = ""
    if fields.get("tools"):
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in fields["tools"])
        text = f"{_TOOLS_PREAMBLE}<tools>\n{lines}\n</tools>\n"
    for message in fields["messages"]:
        text += f"<|im_start|>{message['role']}\n{_text(message['content'])}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
