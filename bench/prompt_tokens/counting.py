"""Prompt tokens as an engine counts them: a chat template, a real tokenizer, and a model family's rule for media.

The tokenizers are those that the LiteLLM package carries: cl100k (whose splits and merges Llama 3 and Qwen build on),
o200k (gpt-oss) and Anthropic's. Rules for pictures are those of vLLM's model code. Sound is Qwen2-Audio's 25 tokens per
second.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.prompt_tokens.corpus import CorpusRequest, Message

Count = Callable[[str], int]
SOUND_TOKENS_PER_S: Final = 25.0
_TOOLS_PREAMBLE: Final = "# Tools\n\nYou may call one or more functions to assist with the user query.\n"


def load_tokenizers() -> dict[str, Count]:
    """Each tokenizer by its name, as a function from text to its number of tokens."""
    spec = importlib.util.find_spec("litellm")
    assert spec is not None, "install requirements/clients.txt"
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "litellm_core_utils" / "tokenizers"
    os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)  # so that tiktoken downloads nothing
    import tiktoken  # noqa: PLC0415 - reads the variable above
    from tokenizers import Tokenizer  # noqa: PLC0415 - of the optional requirements, as the one above

    def byte_pairs(name: str) -> Count:
        encoding = tiktoken.get_encoding(name)
        return lambda text: len(encoding.encode(text, disallowed_special=()))

    anthropic = Tokenizer.from_file(str(folder / "anthropic_tokenizer.json"))
    return {
        "cl100k": byte_pairs("cl100k_base"),
        "o200k": byte_pairs("o200k_base"),
        "anthropic": lambda text: len(anthropic.encode(text).ids),
    }


def prompt_tokens(request: CorpusRequest, count: Count, picture: Callable[[int, int], int]) -> int:
    """Prompt tokens of a request."""
    if request.token_ids:
        return request.token_ids
    pictures = sum(picture(*size) for size in request.pictures)
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


def qwen_picture(width: int, height: int) -> int:
    """Qwen2.5-VL: patches of 28 x 28 pixels, sides rounded to whole patches."""
    return round(width / 28) * round(height / 28) + 2


def gemma_picture(width: int, height: int) -> int:
    """Gemma 3 without pan and scan: 256, whatever the size."""
    return 256 + 2


def internvl_picture(width: int, height: int) -> int:
    """InternVL: up to 12 tiles of 448 x 448 in the closest ratio of sides, and a thumbnail, of 256 tokens each."""
    grids = [(x, y) for x in range(1, 13) for y in range(1, 13) if x * y <= 12]
    best = min(grids, key=lambda grid: (abs(width / height - grid[0] / grid[1]), -_enough(grid, width, height)))
    tiles = best[0] * best[1]
    return 256 * (tiles + (tiles > 1)) + 2


def _enough(grid: tuple[int, int], width: int, height: int) -> int:
    """A larger grid of the same ratio is taken if the picture has more than half of its pixels."""
    tiles = grid[0] * grid[1]
    return tiles if width * height > 0.5 * 448 * 448 * tiles else 0


def pixtral_picture(width: int, height: int) -> int:
    """Pixtral: patches of 16 x 16 pixels of a picture of at most 1,024, and one token at the end of each row."""
    scale = min(1.0, 1024 / max(width, height))
    columns, rows = math.ceil(width * scale / 16), math.ceil(height * scale / 16)
    return columns * rows + rows


PICTURES: Final[dict[str, Callable[[int, int], int]]] = {
    "Qwen2.5-VL": qwen_picture,
    "Gemma 3": gemma_picture,
    "InternVL": internvl_picture,
    "Pixtral": pixtral_picture,
}
