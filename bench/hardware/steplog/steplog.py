"""A vLLM plugin: one CSV line for each engine step, as the scheduler saw it, and weights that are no zeros.

Problem: the law of a step is fitted to steps, and vLLM counts them without saying what was in them.
Idea: a general plugin wraps the scheduler's two calls of a step. Put this folder on PYTHONPATH (the dist-info beside
this file names the entry point). STEPLOG_PATH: the file to append to, unset for none. STEPLOG_WEIGHTS=1: vLLM's dummy
weights get the spread of trained ones; its own +-1e-3 is all but zero, and products of zeros take less power and time.

Times are the monotonic clock's, so that clients' times compare: t_sched when a step was composed, t_out when its tokens
came back. npre, pretok, preattn: prefill chunks, their tokens and the sum of n (context + n / 2); ndec, decctx:
sequences that decode and their summed context; run, wait, kv after the step.
"""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path
from typing import Any

COLUMNS = "t_sched,t_out,npre,pretok,preattn,ndec,decctx,run,wait,kv"
_FLUSH_S = 0.2
_WIDE_STD = 0.035  # uniform within this has a standard deviation of 0.02
_INIT_STD_RATIO = 240.0
_SCALES = 1 << 20  # single-precision parameters up to this size are scales
_ROWS = 1024  # of an 8-bit matrix drawn at once; of stacked ones each alone
_MAX_SPECULATIVE = 16  # tokens of one step that are still decoding; a resumed request computes more


class StepLog:
    """The file, written in blocks."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("a", buffering=1 << 16)  # noqa: SIM115  as long as the process
        if self._file.tell() == 0:
            self._file.write(COLUMNS + "\n")
        self._flushed = 0.0

    def row(self, line: str, now: float, idle: bool) -> None:
        self._file.write(line)
        if idle or now - self._flushed > _FLUSH_S:
            self._file.flush()
            self._flushed = now


def step_counts(output: Any) -> tuple[int, int, float, int, int]:
    """Of a scheduler's output: prefill chunks, their tokens, their pairs; sequences that decode, their context."""
    tokens = output.num_scheduled_tokens
    chunks = [(tokens.get(new.req_id, 0), new.num_computed_tokens) for new in output.scheduled_new_reqs]
    cached = output.scheduled_cached_reqs
    contexts = []
    for request, context, generated in zip(
        cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=False
    ):
        number = tokens.get(request, 0)
        if generated > 0 and number <= _MAX_SPECULATIVE:
            contexts.append(context)
        else:
            chunks.append((number, context))
    pairs = sum(number * (context + number / 2) for number, context in chunks)
    return len(chunks), sum(number for number, _ in chunks), pairs, len(contexts), sum(contexts)


def register() -> None:
    """vLLM's entry point; in processes without a scheduler it changes nothing that is used."""
    if os.environ.get("STEPLOG_WEIGHTS") == "1":
        _randomize_weights()
    path = os.environ.get("STEPLOG_PATH")
    scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    if not path or hasattr(scheduler, "steplog"):
        return
    scheduler.steplog = path
    schedule, update = scheduler.schedule, scheduler.update_from_output
    logs: list[StepLog] = []

    def timed_schedule(self: Any, *args: Any, **named: Any) -> Any:
        output = schedule(self, *args, **named)
        output.steplog_s = time.monotonic()
        return output

    def logged_update(self: Any, output: Any, *args: Any, **named: Any) -> Any:
        result = update(self, output, *args, **named)
        if output.total_num_scheduled_tokens:
            if not logs:
                logs.append(StepLog(path))
            now, running, waiting = time.monotonic(), len(self.running), len(self.waiting)
            npre, pretok, pairs, ndec, context = step_counts(output)
            line = f"{output.steplog_s:.6f},{now:.6f},{npre},{pretok},{pairs:.0f},{ndec},{context}"
            line += f",{running},{waiting},{self.kv_cache_manager.usage:.4f}\n"
            logs[0].row(line, now, running + waiting == 0)
        return result

    scheduler.schedule, scheduler.update_from_output = timed_schedule, logged_update


def _randomize_weights() -> None:
    torch = importlib.import_module("torch")

    def draw_weights(parameter: Any, low: float = 0.0, high: float = 0.0, seed: int = 1234) -> None:
        """Matrices with a standard deviation of 0.02, norms near 1, whatever low and high are asked for.

        Eight-bit matrices are drawn over their range in parts, and their scales are such that the product is the same.
        """
        data = parameter.data
        if parameter.device.type == "meta" or not torch.is_floating_point(data):
            return
        generator = torch.Generator(device=data.device)
        generator.manual_seed(seed + data.numel() % 9973 + data.dim())
        if torch.finfo(data.dtype).bits < 16:
            for part in data.split(_ROWS if data.dim() == 2 else 1):
                wide = torch.empty(part.shape, dtype=torch.float16, device=data.device)
                part.copy_(wide.uniform_(-_INIT_STD_RATIO, _INIT_STD_RATIO, generator=generator).to(data.dtype))
        elif data.dtype == torch.float32 and data.numel() <= _SCALES:
            data.fill_(_WIDE_STD / _INIT_STD_RATIO)
        elif data.dim() >= 2:
            data.uniform_(-_WIDE_STD, _WIDE_STD, generator=generator)
        else:
            data.uniform_(0.9, 1.1, generator=generator)

    for name in ("weight_utils", "dummy_loader"):
        module: Any = importlib.import_module(f"vllm.model_executor.model_loader.{name}")
        if hasattr(module, "initialize_single_dummy_weight"):
            module.initialize_single_dummy_weight = draw_weights
