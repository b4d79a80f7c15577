"""Load tools of other projects, against the gateway: vLLM's `bench serve`, and GuideLLM if it was carried.

Problem: a client of the project's own could be kind to the project.
Idea: each tool draws requests of its own, of a chat's mean lengths, and reports the results itself. Its whole result
without lists is stored; a tool that fails or takes too long leaves the end of its output.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bench.hardware import client, dummy_models
from e2e.gpu.observer import Observer
from e2e.gpu.scenarios import SERVICE, TPOT_S, TTFT_S
from e2e.gpu.settings import ENGINE, GATEWAY_URL, PARTS, ROOT

PROMPT, OUTPUT = 1000, 200  # tokens
SECONDS: Final = 30.0
_LIMIT_S: Final = 75.0
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_GUIDELLM: Final = ROOT / "tools"  # its packages, in addition to those of the machine


def run_all(rate: float, observer: Observer) -> dict[str, Any]:
    """Results by tool. rate: requests/s."""
    folder = ROOT / "traces"
    tokenizer = dummy_models.write_model(ROOT / "models", "8b")
    found = {"vllm bench serve": _run(_vllm(rate, tokenizer, folder), folder / "bench.json", [ENGINE / "site"])}
    observer.mark("vllm bench serve is over", **_short(found["vllm bench serve"]))
    if wheels := sorted(PARTS.glob("*.whl")):
        if not _GUIDELLM.exists():
            install = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target"]
            subprocess.run([*install, str(_GUIDELLM), *map(str, wheels)], check=False, timeout=_LIMIT_S)
        found["guidellm"] = _run(_guidellm(rate, tokenizer, folder), folder / "guidellm.json", [_GUIDELLM])
        observer.mark("guidellm is over", **_short(found["guidellm"]))
    return found


def _vllm(rate: float, tokenizer: Path, folder: Path) -> list[str]:
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
    words += ["--base-url", GATEWAY_URL, "--endpoint", client.COMPLETIONS, "--model", SERVICE]
    words += ["--tokenizer", str(tokenizer), "--dataset-name", "random", "--random-input-len", str(PROMPT)]
    words += ["--random-output-len", str(OUTPUT), "--request-rate", f"{rate:.2f}"]
    words += ["--num-prompts", str(round(rate * SECONDS)), "--ignore-eos", "--seed", "29"]
    words += ["--save-result", "--result-dir", str(folder), "--result-filename", "bench.json"]
    words += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,95,99"]
    return [*words, "--goodput", f"ttft:{TTFT_S * 1000:.0f}", f"tpot:{TPOT_S * 1000:.0f}"]


def _guidellm(rate: float, tokenizer: Path, folder: Path) -> list[str]:
    backend = f"kind=openai_http,target={GATEWAY_URL},model={SERVICE},request_format={client.COMPLETIONS}"
    words = [sys.executable, "-m", "guidellm", "run", "--backend", f"{backend},validate_backend=false"]
    words += ["--profile", f"kind=poisson,rate={rate:.2f}", "--constraint", f"kind=max_duration,seconds={SECONDS:.0f}"]
    words += ["--data", f"kind=json_file,path={write_prompts(folder / 'prompts.jsonl', round(2 * rate * SECONDS))}"]
    words += ["--tokenizer", f"kind=hf_auto,model={tokenizer}", "--disable-console-interactive"]
    return [*words, "--output", f"kind=json,path={folder / 'guidellm.json'}"]


def write_prompts(path: Path, count: int) -> Path:
    """Prompts of PROMPT random words, as GuideLLM reads them: the made tokenizer knows no words of a language."""
    draw = random.Random(29)
    with path.open("w") as file:
        for _ in range(count):
            words = " ".join(f"w{draw.randrange(1_000, 100_000)}" for _ in range(PROMPT))
            file.write(json.dumps({"prompt": words, "output_tokens_count": OUTPUT}) + "\n")
    return path


def _run(command: Sequence[str], target: Path, packages: Sequence[Path]) -> dict[str, Any]:
    variables = {**os.environ, **_OFFLINE, "PYTHONPATH": ":".join(map(str, packages))}
    target.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=_LIMIT_S, check=False, cwd=target.parent
        )
        output = (done.stdout + done.stderr)[-4000:]
    except subprocess.TimeoutExpired as error:
        output = f"not within {error.timeout} s: {str(error.stdout)[-2000:]} {str(error.stderr)[-2000:]}"
    if not target.exists():
        return {"command": command, "output": output}
    return {"command": command, "result": without_lists(json.loads(target.read_text())), "output": output[-1500:]}


def without_lists(document: Any) -> Any:
    """The document with its long lists cut: each request is in one."""
    if isinstance(document, Mapping):
        return {key: without_lists(value) for key, value in document.items()}
    if isinstance(document, list):
        return [without_lists(value) for value in document[:2]]
    return document


def _short(found: Mapping[str, Any]) -> dict[str, Any]:
    result = found.get("result")
    if not result:
        return {"end": str(found["output"])[-400:]}
    return {key: result[key] for key in ("completed", "failed", "p95_ttft_ms", "p95_tpot_ms") if key in result}
