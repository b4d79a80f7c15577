"""The model's config.json where the engine has it, reduced to what decides its speed.

Problem: what a model costs follows from its shape, and only the engine's own disk has the file that says it: a folder,
or the cache into which the engine has downloaded the model.
Idea: look where Hugging Face's library puts it, and ask nobody. Of a file of any size only known keys are kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAME = "config.json"
MAX_BYTES = 4 << 20
# What plimsoll.core.roofline.model_shape reads.
KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "sliding_window",
    "use_sliding_window",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "decoder_sparse_step",
    "mlp_only_layers",
)
NESTED, QUANTISED = "text_config", "quantization_config"


def read(model: str, revision: str, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The reduced configuration of the model that the engine serves, None where none is found; never fails."""
    try:
        found = (_parsed(path) for path in _places(model, revision, environment))
        return next((config for config in found if config is not None), None)
    except OSError:
        return None


def _parsed(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(MAX_BYTES), parse_float=_finite, parse_constant=_finite)
        return reduced(document)
    except (OSError, ValueError, RecursionError):
        return None


def _finite(text: str) -> float | None:
    """A number that JSON can say again: Python reads NaN and Infinity, others do not."""
    number = float(text)
    return number if math.isfinite(number) else None


def _places(model: str, revision: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """Where the file may lie: the model's folder, then the snapshot of its revision in the cache.

    Where no revision is pinned: what the main branch was, then the newest snapshot.
    """
    yield Path(model) / NAME
    repository = _hub(environment) / f"models--{model.replace('/', '--')}"
    snapshots = repository / "snapshots"
    if revision:
        yield snapshots / revision / NAME
    try:
        commit = (repository / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
        yield snapshots / commit / NAME
    except (OSError, ValueError):
        pass
    if not revision:
        yield from sorted(snapshots.glob(f"*/{NAME}"), key=lambda path: path.lstat().st_mtime, reverse=True)


def _hub(environment: Mapping[str, str]) -> Path:
    caches = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '')}/.cache"
    home = environment.get("HF_HOME") or f"{caches}/huggingface"
    return Path(environment.get("HF_HUB_CACHE") or f"{home}/hub")


def reduced(config: object) -> dict[str, Any] | None:
    """The keys of a configuration that decide its speed; None for what is no JSON object."""
    if not isinstance(config, dict):
        return None
    kept = _level(config)
    if isinstance(config.get(NESTED), dict):
        kept[NESTED] = _level(config[NESTED])
    return kept


def _level(config: dict[str, Any]) -> dict[str, Any]:
    kept = {key: config[key] for key in KEYS if key in config}
    if QUANTISED in config:
        kept[QUANTISED] = _quantised(config[QUANTISED])
    return kept


def _quantised(config: Any) -> Any:
    """Method and widths; the lists of layers that are left alone can be long."""
    if not isinstance(config, dict):
        return config
    kept = {key: config[key] for key in ("quant_method", "bits") if key in config}
    groups = config.get("config_groups")
    if isinstance(groups, dict):
        kept["config_groups"] = {name: _group(group) for name, group in groups.items() if isinstance(group, dict)}
    return kept


def _group(group: dict[str, Any]) -> dict[str, Any]:
    said = {part: group[part] for part in ("weights", "input_activations") if group.get(part)}
    return {part: {"num_bits": how.get("num_bits") if isinstance(how, dict) else None} for part, how in said.items()}
