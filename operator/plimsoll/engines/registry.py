"""All engines by the value of `spec.engine.runtime`."""

from __future__ import annotations

from typing import Final

from plimsoll.engines.engine import Engine, Feature
from plimsoll.engines.launched import SIMULATED, VLLM
from plimsoll.engines.llama_cpp import LLAMA_CPP
from plimsoll.engines.openai import OPENAI
from plimsoll.engines.sglang import SGLANG
from plimsoll.engines.tensorrt_llm import TENSORRT_LLM
from plimsoll.engines.tgi import TGI

ENGINES: Final = {engine.name: engine for engine in (VLLM, SIMULATED, LLAMA_CPP, SGLANG, TENSORRT_LLM, TGI, OPENAI)}
DEFAULT_ENGINE: Final = VLLM


def engine_named(name: str | None) -> Engine:
    """The engine of that name; vLLM for None and for a name that a newer release may know."""
    return ENGINES.get(name or "", DEFAULT_ENGINE)


def engines_with(feature: Feature) -> tuple[str, ...]:
    """The names of the engines that have a feature."""
    return tuple(name for name, engine in ENGINES.items() if feature in engine.features)


def engines_without(feature: Feature) -> tuple[str, ...]:
    """The names of the engines that lack a feature."""
    return tuple(name for name, engine in ENGINES.items() if feature not in engine.features)
