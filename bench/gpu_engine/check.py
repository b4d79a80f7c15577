"""Checks the launcher with a real vLLM on one GPU, from its first start to its end, and prints the results as JSON.

    python -m bench.gpu_engine.check --out DIR [--only first,second,...] [--arg=--flag ...]

Problem: tests run the launcher with vLLM on a CPU. Compilation, CUDA graphs, long steps, GPU memory and processes that
die inside a driver are different on a GPU.
Idea: engines of one model without weights, one after another, each started as the operator would start its pod. `first`
has empty caches, `second` the caches of the first. Each ends in another way: SIGTERM with streams running, a core that
hangs, a core that is killed, a start that does not fit the GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench.gpu_engine import lora_adapter, machine, serving
from bench.gpu_engine.results import Results, flag_errors, missing_about, missing_signals, ready_before_warm
from bench.hardware import dummy_models, engine, measure
from launcher.contract import Contract, load
from plimsoll.adapters.engine_metrics import parse_metrics
from plimsoll.engines import launched

MAX_SEQUENCES: Final = 256
QUEUE_LIMIT: Final = 300
LONG_PROMPT_TOKENS: Final = 100_000
READY_S: Final = 400.0
HANG_ENDS_S: Final = 75.0  # unready after 10 s, killed after 40 s, then the end of a process inside a driver
KILLED_ENDS_S: Final = 25.0
UNREADY_S: Final = {"vllm": 15.0, "simulated": 120.0}  # the simulator's steps stretch the limit
_MODEL_ARGS: Final = ("--max-model-len", "131072", "--max-num-seqs", str(MAX_SEQUENCES))
_RUNTIME_ARGS: Final = {"vllm": ("--load-format", "dummy"), "simulated": ("--profile", "h200-8b")}
_TOO_MUCH_CACHE: Final = ("--kv-cache-memory-bytes", str(400 * 2**30))
_FLAGS: Final = (
    "--disable-access-log-for-endpoints", "--max-num-queued-reqs", "--host", "--port", "--served-model-name",
    "--middleware", "--shutdown-timeout",
)  # fmt: skip


class Session:
    """One run of the checks: where it writes, and how its engines are started."""

    def __init__(self, out: Path, model: str, runtime: str, args: Sequence[str]) -> None:
        self.out, self.model_name, self.runtime = out, model, runtime
        self._args = (*_RUNTIME_ARGS[runtime], *_MODEL_ARGS, *args)
        self.contract: Contract = load()
        self.results = Results(out / "results.json")
        self.model = dummy_models.write_model(out / "models", model)
        self._home = out / "home"

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of KV cache of one token in 16 bits."""
        config = dummy_models.CONFIGS[self.model_name]
        return 4 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])

    def launch(self, name: str, args: Sequence[str] = (), api: int = 8000) -> engine.LaunchedEngine:
        """Starts an engine with the folders of caches that the operator gives its pods, on its own ports."""
        cache = self._home / ".cache"
        variables = {
            "HOME": str(self._home),
            "HF_HOME": str(self._home / "hf"),
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "torchinductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }
        self._home.mkdir(exist_ok=True)
        return engine.launch(
            name, self.model, self.out, api=api, args=(*self._args, *args), runtime=self.runtime, variables=variables
        )

    @contextlib.contextmanager
    def running(self, name: str, args: Sequence[str] = ()) -> Iterator[engine.LaunchedEngine | None]:
        """An engine that is ready, with the checks of its start; None if it does not become ready.

        At the end of the block what is left of it is killed, and GPU memory must be free again.
        """
        before_mib = machine.used_mib()
        run = self.launch(name, args)
        try:
            ready = self._check_start(run)
            yield run if ready else None
        finally:
            had_ended = run.process.poll() is not None
            run.kill()
            freed, now_mib = machine.wait_memory_freed(before_mib)
            self.results.check(
                f"{name}: GPU memory is free after the end", freed, before_mib=before_mib, after_mib=now_mib,
                ended_by_itself=had_ended,
            )  # fmt: skip

    def _check_start(self, run: engine.LaunchedEngine) -> bool:
        results, name = self.results, run.name
        ready = run.wait_ready(READY_S)
        command = engine.command_line(self.out, name)
        about = run.last_documents
        phases = dict(about.get("phases", ()))
        seconds = run.timeline[-1]["at_s"] if run.timeline else None
        rounded = {phase: round(value, 2) for phase, value in phases.items()}
        if not results.check(f"{name}: ready", ready, seconds=seconds, phases=rounded):
            print((self.out / f"{name}.log").read_text(errors="replace")[-6000:])
            return False
        results.note(f"{name} command", command)
        results.note(f"{name} about", about)
        lacking = flag_errors(command, _FLAGS)
        results.check(f"{name}: the engine accepted the contract's flags", not lacking, lacking=lacking)
        unseen = [phase for phase in self.contract.startup_phases if phase not in phases and phase != "download"]
        results.check(f"{name}: every phase of the start was seen", not unseen, unseen=unseen)
        early = ready_before_warm(run.timeline)
        results.check(f"{name}: not ready before the warm-up's end", not early, early=early)
        missing = missing_about(about)
        benchmark, limits = about.get("self_benchmark") or {}, about["limits"]
        results.check(f"{name}: /about is complete", not missing, missing=missing, limits=limits, benchmark=benchmark)
        warnings = [line for line in self.log_lines(name) if line.startswith("(launcher) WARNING")]
        results.check(f"{name}: the start has no warning of the launcher", not warnings, warnings=warnings[:5])
        return True

    def log_lines(self, name: str) -> list[str]:
        return (self.out / f"{name}.log").read_text(errors="replace").splitlines()

    def termination(self, name: str) -> str:
        """The last words of a launcher; empty where it left none."""
        file = self.out / f"{name}.termination"
        return file.read_text() if file.exists() else ""


def first(session: Session) -> None:
    """Empty caches; serves; is watched under heavy load; stands still for a while; drains."""
    results = session.results
    with session.running("first") as run:
        if run is None:
            return
        asyncio.run(serving.check_answers(run, session.contract, results))
        _check_metrics(run, results)
        sequences = MAX_SEQUENCES if session.runtime == "vllm" else 16
        asyncio.run(serving.check_heavy_load(run, session.contract, results, sequences, LONG_PROMPT_TOKENS))
        asyncio.run(serving.check_stopped_core(run, session.contract, results, UNREADY_S[session.runtime]))
        ended = asyncio.run(engine.check_drain(run))
        streams, late = ended["streams"], ended["late"]
        whole = all(stream["ok"] for stream in streams) and ended["exit_code"] == 0
        results.check("first: SIGTERM cuts no stream and the exit code is 0", whole, **ended)
        refused = late["status"] == 503 and (late["headers"] or {}).get("x-plimsoll-reason") == "draining"
        results.check("first: a request after SIGTERM is refused with the mark to retry", refused, late=late)


def _check_metrics(run: engine.LaunchedEngine, results: Results) -> None:
    page = run.metrics()
    reading = parse_metrics(page.encode(), run.name, time.time(), launched.METRICS)
    missing = missing_signals(reading)
    names = sorted({line.split("{")[0].split(" ")[0] for line in page.splitlines() if line.startswith("vllm:")})
    results.note("metric names", names)
    results.check("first: the operator reads every signal", not missing, missing=missing, metrics=len(names))
    own = run.own_metrics()
    results.check("first: the launcher's own metrics are on the page", len(own) > 0, lines=len(own))


def second(session: Session) -> None:
    """The caches of the first; refuses what is above its limit; its core hangs for good."""
    results = session.results
    with session.running("second", ("--max-num-queued-reqs", str(QUEUE_LIMIT))) as run:
        if run is None:
            return
        if session.runtime == "vllm":
            asyncio.run(serving.check_queue_limit(run, results, QUEUE_LIMIT))
        asyncio.run(serving.check_hung_core(run, results, HANG_ENDS_S))
        words = session.termination("second")
        results.check("second: the termination message names the hang", "no progress" in words, message=words)


def lora(session: Session) -> None:
    """An adapter that was made; the core is killed."""
    results = session.results
    folder = lora_adapter.write_adapter(session.out / "adapter", dummy_models.CONFIGS[session.model_name])
    module = json.dumps({"name": "adapter", "path": str(folder)})
    args = ("--enable-lora", "--max-lora-rank", str(lora_adapter.RANK), "--lora-modules", module)
    with session.running("lora", args) as run:
        if run is None:
            return
        asyncio.run(serving.check_adapter(run, results, "adapter"))
        asyncio.run(serving.check_killed_core(run, session.contract, results, KILLED_ENDS_S))
        words = session.termination("lora")
        results.check("lora: the termination message has a cause", bool(words), message=words)


def toolarge(session: Session) -> None:
    """More KV cache than the GPU has: the start must end soon, with the cause in the termination message."""
    results = session.results
    before_mib = machine.used_mib()
    run = session.launch("toolarge", _TOO_MUCH_CACHE)
    began = time.monotonic()
    try:
        while run.process.poll() is None and time.monotonic() - began < READY_S:
            time.sleep(0.2)
        code, seconds = run.process.poll(), round(time.monotonic() - began, 1)
    finally:
        run.kill()
    results.check("toolarge: the launcher ends with a failure", code not in (None, 0), code=code, seconds=seconds)
    words = session.termination("toolarge")
    results.check("toolarge: the termination message names the memory", "memory" in words.lower(), message=words)
    freed, now_mib = machine.wait_memory_freed(before_mib)
    results.check("toolarge: GPU memory is free after the end", freed, before_mib=before_mib, after_mib=now_mib)


STAGES: Final = {"first": first, "second": second, "lora": lora, "toolarge": toolarge}


def main(argv: Sequence[str] | None = None) -> int:
    parser = measure.arguments("bench.gpu_engine.check")
    parser.add_argument("--model", choices=sorted(dummy_models.CONFIGS), default="8b")
    parser.add_argument("--only", default="", help="engines to start, in order (all; of the simulator: first,second)")
    given = parser.parse_args(argv)
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an engine that runs is killed on the way out
    session = Session(out, given.model, given.runtime, given.arg)
    session.results.note("versions", machine.versions())
    names = given.only or ",".join(STAGES if given.runtime == "vllm" else ("first", "second"))
    for name in names.split(","):
        try:
            STAGES[name](session)
        except Exception as error:  # noqa: BLE001  the next engine's checks are still worth their time
            session.results.check(f"{name}: completed", False, error=f"{type(error).__name__}: {error}"[:500])
    document: dict[str, Any] = session.results.document()
    print(json.dumps({name: document[name] for name in ("passed", "failed")}))
    return 1 if document["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
