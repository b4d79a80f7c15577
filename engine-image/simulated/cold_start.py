"""A cold start: no port is open until it is over, and the log has vLLM's lines.

Problem: scalers are tested with start-up times, and the launcher reads their phases from vLLM's log. Idea: the start-up
time is divided as on an H200 with weights from a disk (nearly half for imports and the engine process, a quarter for
weights, the rest for compilation and graphs), and a line of vLLM's ends each part. Weights are downloaded only if the
model is not a path.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulated.options import EngineOptions

VERSION = "0.32.0+simulated"
_IMPORT_SHARE, _DOWNLOAD_SHARE, _LOAD_SHARE, _INIT_SHARE = 0.45, 0.10, 0.15, 0.30


@dataclass(frozen=True)
class StartupPhase:
    """Seconds from the end of the previous phase, and the log lines that end this one: (source, message)."""

    seconds: float
    log_lines: tuple[tuple[str, str], ...]


def startup_phases(options: EngineOptions) -> list[StartupPhase]:
    """Return the phases of a start, in order; their seconds add up to the whole start."""
    total, profile = options.startup_s, options.profile
    downloaded = not options.model.startswith("/")
    load_s = total * (_LOAD_SHARE if downloaded else _LOAD_SHARE + _DOWNLOAD_SHARE)
    init_s = total * _INIT_SHARE
    config = (
        f"model={options.model!r}, max_seq_len={profile.max_model_len}, served_model_name={options.served_names[0]}"
    )
    result = [
        StartupPhase(
            total * _IMPORT_SHARE,
            (("core.py:107", f"Initializing a V1 LLM engine (v{VERSION}) with config: {config}"),),
        )
    ]
    if downloaded:
        download_s = total * _DOWNLOAD_SHARE
        message = f"Time spent downloading weights for {options.model}: {download_s:.6f} seconds"
        result.append(StartupPhase(download_s, (("weight_utils.py:583", message),)))
    load_lines = (
        ("default_loader.py:397", f"Loading weights took {load_s:.2f} seconds"),
        ("gpu_model_runner.py:4918", f"Model loading took 0.0 GiB memory and {load_s:.6f} seconds"),
    )
    result.append(StartupPhase(load_s, load_lines))
    ready_lines = (
        ("kv_cache_utils.py:1710", f"GPU KV cache size: {profile.kv_tokens:,} tokens"),
        ("core.py:282", f"init engine (profile, create kv cache, warmup model) took {init_s:.2f} s"),
    )
    result.append(StartupPhase(init_s, ready_lines))
    return result
