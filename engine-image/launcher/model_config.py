"""The model's config.json on the engine's disk, reduced to the fields that decide its speed.

Problem: a model's cost follows from its shape, and only the engine's own disk has the file: in a folder, or in the
cache into which the engine has downloaded the model. Idea: look where Hugging Face's library stores it, without any
request. Only known keys of the file are kept.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from launcher import model_cache

CONFIG_FILE = "config.json"
COMMIT: Final = re.compile("[0-9a-f]{40}")
MAX_BYTES = 4 << 20
# What plimsoll.core.engine_model.roofline.model_shape reads.
SPEED_KEYS = (
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
NESTED_KEY, QUANTIZATION_KEY = "text_config", "quantization_config"


def read(model: str, revision: str, environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the reduced configuration of the engine's model, None if none is found; never fails."""
    try:
        configs = (_parse_file(path) for path in _candidate_paths(model, revision, environment))
        return next((config for config in configs if config is not None), None)
    except OSError:
        return None


def revision(model: str, revision: str, environment: Mapping[str, str]) -> str | None:
    """Return what pins the engine's model: the digest of downloaded files, or a commit of its repository."""
    if (found := model_cache.read_complete(Path(model).resolve().parent)) is not None:
        return found.digest
    refs = _repository(model, environment) / "refs"
    try:
        return (refs / (revision or "main")).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return revision if COMMIT.fullmatch(revision) else None


def _parse_file(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(MAX_BYTES), parse_float=_finite_or_none, parse_constant=_finite_or_none)
        return reduce_config(document)
    except (OSError, ValueError, RecursionError):
        return None


def _finite_or_none(text: str) -> float | None:
    """Return a number that is valid JSON: Python accepts NaN and Infinity, others do not."""
    number = float(text)
    return number if math.isfinite(number) else None


def _candidate_paths(model: str, revision: str, environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield possible paths of the file: the model's folder, then the snapshot of its revision in the cache.

    Without a pinned revision: the last main branch, then the newest snapshot.
    """
    yield Path(model) / CONFIG_FILE
    repository = _repository(model, environment)
    snapshots = repository / "snapshots"
    if revision:
        yield snapshots / revision / CONFIG_FILE
    try:
        commit = (repository / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
        yield snapshots / commit / CONFIG_FILE
    except (OSError, ValueError):
        pass
    if not revision:
        yield from sorted(snapshots.glob(f"*/{CONFIG_FILE}"), key=lambda path: path.lstat().st_mtime, reverse=True)


def _repository(model: str, environment: Mapping[str, str]) -> Path:
    return _hub_cache(environment) / f"models--{model.replace('/', '--')}"


def _hub_cache(environment: Mapping[str, str]) -> Path:
    caches = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '')}/.cache"
    home = environment.get("HF_HOME") or f"{caches}/huggingface"
    return Path(environment.get("HF_HUB_CACHE") or f"{home}/hub")


def reduce_config(config: object) -> dict[str, Any] | None:
    """Return the keys of a configuration that decide its speed; None if it is no JSON object."""
    if not isinstance(config, dict):
        return None
    selected = _select_keys(config)
    if isinstance(config.get(NESTED_KEY), dict):
        selected[NESTED_KEY] = _select_keys(config[NESTED_KEY])
    return selected


def _select_keys(config: dict[str, Any]) -> dict[str, Any]:
    selected = {key: config[key] for key in SPEED_KEYS if key in config}
    if QUANTIZATION_KEY in config:
        selected[QUANTIZATION_KEY] = _reduce_quantization(config[QUANTIZATION_KEY])
    return selected


def _reduce_quantization(config: Any) -> Any:
    """Return method and widths; the lists of excluded layers can be long."""
    if not isinstance(config, dict):
        return config
    selected = {key: config[key] for key in ("quant_method", "bits") if key in config}
    groups = config.get("config_groups")
    if isinstance(groups, dict):
        selected["config_groups"] = {
            name: _reduce_group(group) for name, group in groups.items() if isinstance(group, dict)
        }
    return selected


def _reduce_group(group: dict[str, Any]) -> dict[str, Any]:
    parts = {part: group[part] for part in ("weights", "input_activations") if group.get(part)}
    return {
        part: {"num_bits": settings.get("num_bits") if isinstance(settings, dict) else None}
        for part, settings in parts.items()
    }
