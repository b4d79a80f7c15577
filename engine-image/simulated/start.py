"""A cold start: nothing listens until it is over, and the log says what vLLM's says on the way.

Problem: a scaler must live with starts, and the launcher reads their phases from vLLM's log.
Idea: the start's seconds are divided as on an H200 with weights from a disk (nearly half for imports and the engine
process, a quarter for weights, the rest for compilation and graphs), and a line of vLLM's ends each part. Weights are
downloaded only where the model is not a path.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulated.options import Options

VERSION = "0.32.0+simulated"
_IMPORT, _DOWNLOAD, _LOAD, _INIT = 0.45, 0.10, 0.15, 0.30


@dataclass(frozen=True)
class Phase:
    """Seconds from the end of the phase before, and the lines that end this one: (source, words)."""

    seconds: float
    lines: tuple[tuple[str, str], ...]


def phases(options: Options) -> list[Phase]:
    """The parts of a start, in order; their seconds add up to the whole start."""
    total, profile = options.start_s, options.profile
    downloaded = not options.model.startswith("/")
    load_s = total * (_LOAD if downloaded else _LOAD + _DOWNLOAD)
    init_s = total * _INIT
    config = f"model={options.model!r}, max_seq_len={profile.max_model_len}, served_model_name={options.names[0]}"
    found = [
        Phase(total * _IMPORT, (("core.py:107", f"Initializing a V1 LLM engine (v{VERSION}) with config: {config}"),))
    ]
    if downloaded:
        took = total * _DOWNLOAD
        words = f"Time spent downloading weights for {options.model}: {took:.6f} seconds"
        found.append(Phase(took, (("weight_utils.py:583", words),)))
    loaded = (
        ("default_loader.py:397", f"Loading weights took {load_s:.2f} seconds"),
        ("gpu_model_runner.py:4918", f"Model loading took 0.0 GiB memory and {load_s:.6f} seconds"),
    )
    found.append(Phase(load_s, loaded))
    ready = (
        ("kv_cache_utils.py:1710", f"GPU KV cache size: {profile.kv_tokens:,} tokens"),
        ("core.py:282", f"init engine (profile, create kv cache, warmup model) took {init_s:.2f} s"),
    )
    found.append(Phase(init_s, ready))
    return found
