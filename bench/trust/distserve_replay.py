"""DistServe's own machines: its recorded requests on A100s, replayed with its published step times.

Problem: the paper's table 2 gives shares of requests within limits, but neither the limits nor the requests behind it.
Its repository has the authors' recorded requests for such systems and rates (OPT-13B, ShareGPT): arrivals, lengths and
latencies. Idea: those, assessed at the limits of the authors' own comparison, 200 and 100 ms; the plant's engine gets
their coefficients and the schedule of the systems of that time:

- no step is composed while another runs, and there is no chunked prefill,
- vLLM then: waiting prompts go first, in steps of their own, while all streams stall,
- DistServe: one prefill engine of two GPUs, one decode engine of one GPU; moving KV costs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from bench.trust.check import SimulatorCheck
from bench.trust.engine_driver import ReplayedRequest, mean_plant, replay_one_engine, replay_remote_prefill
from bench.trust.recorded_runs import DATA, RequestRecord
from bench.trust.sweep_replay import within_slo
from plimsoll.sim.engine.engine_metrics import EngineMetrics
from plimsoll.sim.engine.kv_cache import KvCache
from plimsoll.sim.engine.kv_link import KvLink
from plimsoll.sim.engine.simulated_engine import SimulatedEngine
from plimsoll.sim.engine.step_run import StepBatch, StepRun
from plimsoll.sim.engine.step_timing import StepTiming
from plimsoll.sim.profile import HardwareProfile, StepCoefficients

PAPER_TTFT_S: Final = 0.2
PAPER_TPOT_S: Final = 0.1
MAX_PAPER_POINTS: Final = 2.0
# Both as the authors' simulator has them (simdistserve/base/worker.py).
KV_TOKENS: Final = 50_000
PREFILL_TOKENS: Final = {"vllm": 2_560, "distserve": 8_192}  # most prompt tokens of a step


class SynchronousEngine(SimulatedEngine):
    """An engine that composes a step when the one before it has ended."""

    MAX_STEPS_IN_FLIGHT = 1


class PrefillFirstEngine(SynchronousEngine):
    """Reads whole prompts by themselves, while whoever decodes stands still, as vLLM did before chunked prefill."""

    def _compose(self, now_s: float) -> StepRun | None:
        scheduler, batch = self._scheduler, StepBatch()
        token_room = scheduler.token_budget
        while self.waiting and self.running < scheduler.max_sequences and self.waiting[0].prompt_tokens <= token_room:
            first = self.waiting[0]
            scheduler.admit(batch, first.prompt_tokens, now_s)
            if self.waiting and self.waiting[0] is first:
                break  # there are no blocks for it
            token_room -= first.prompt_tokens
        if not batch.tokens:
            return super()._compose(now_s)
        series = self._timing.series(scheduler.decodes.step, batch.tokens, batch.pairs, 0, 0)
        run = StepRun(
            series, max(now_s, self._device_free_s), now_s, now_s, 1, len(batch.prefill_completions), composed=1
        )
        run.prefill_completions, run.final_sequences = batch.prefill_completions, batch.final_sequences
        for sequence in batch.new_decodes:
            scheduler.decodes.add(sequence)
        self._set_end_times(run)
        return run


def distserve_profile(system: str, reading_gpus: int) -> HardwareProfile:
    """One GPU that writes, `reading_gpus` that read: prompts are read and tokens made in different steps."""
    fits = json.loads((DATA / "distserve-a100.json").read_text())[system]["facebook/opt-13b"]
    prefill_fit, decode_fit = fits[str(reading_gpus)]["prefill"], fits["1"]
    small_batch, large_batch = decode_fit["decoding_smallbs"], decode_fit["decoding_largebs"]
    in_ms = (
        small_batch[0],
        prefill_fit[0] - small_batch[0],
        prefill_fit[1],
        2 * prefill_fit[2],
        small_batch[2],
        small_batch[1],
    )
    return HardwareProfile(
        coefficients=StepCoefficients(*(ms / 1e3 for ms in in_ms)),
        kv_tokens=KV_TOKENS,
        max_num_seqs=256,
        budget=PREFILL_TOKENS[system],
        block_size=16,
        layers=40,
        max_model_len=2_048,
        kv_bytes_per_token=819_200,
        hinge_sequences=decode_fit["decoding_large_small_bs_threshold"],
        hinge_dec=(large_batch[2] - small_batch[2]) / 1e3,
    )


def replay_records(system: str, records: Sequence[RequestRecord]) -> list[ReplayedRequest]:
    """What the plant makes of the authors' requests."""
    requests = [record.request for record in records]
    if system == "vllm":
        profile_used = mean_plant(distserve_profile(system, 1))
        return replay_one_engine(profile_used, requests, _make_engine(PrefillFirstEngine, distserve_profile(system, 1)))
    hardware = distserve_profile(system, 2)
    profile_used = replace(mean_plant(hardware), remote_prefill_http_s=0.0)
    replayed = replay_remote_prefill(
        profile_used, requests, _make_engine(PrefillFirstEngine, hardware), _make_engine(SynchronousEngine, hardware)
    )
    return [
        replace(replayed_request, first_s=replayed_request.remote_prefill_s) for replayed_request in replayed
    ]  # the reading engine makes the first token


def _make_engine(kind: type[SimulatedEngine], profile_used: HardwareProfile) -> SimulatedEngine:
    kv_link = KvLink(
        profile_used.layers, profile_used.block_size, profile_used.kv_bytes_per_token, math.inf, 0.0, 0.0, 0.0
    )
    blocks = KvCache(profile_used.kv_tokens // profile_used.block_size, profile_used.block_size)
    return kind(
        profile_used.max_num_seqs,
        profile_used.budget,
        blocks,
        StepTiming(profile_used),
        kv_link,
        EngineMetrics(profile_used.max_model_len),
        fast_forward=False,
    )


def checks(records: Mapping[tuple[str, str], Sequence[RequestRecord]]) -> list[SimulatorCheck]:
    results = []
    for (system, rate), run_records in records.items():
        replayed = replay_records(system, run_records)
        recorded, simulated = (
            100.0 * sum(side) / len(run_records) for side in zip(*_within_slo(run_records, replayed), strict=True)
        )
        detail = {"recorded": round(recorded, 2), "simulated": round(simulated, 2)}
        name = f"{system} {rate} req/s a GPU, attainment"
        results.append(
            SimulatorCheck(
                "DistServe's records on A100s, OPT-13B", name, simulated - recorded, MAX_PAPER_POINTS, "pt", detail
            )
        )
    return results


def _within_slo(records: Sequence[RequestRecord], replayed: Sequence[ReplayedRequest]) -> list[tuple[bool, bool]]:
    return [
        (
            record.within(PAPER_TTFT_S, PAPER_TPOT_S),
            within_slo(replayed_request, record.request, PAPER_TTFT_S, PAPER_TPOT_S),
        )
        for record, replayed_request in zip(records, replayed, strict=True)
    ]
