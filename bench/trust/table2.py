"""DistServe's own machines: its recorded requests on A100s, replayed with its published step times.

Problem: the paper's table 2 gives shares of requests within limits, but neither the limits nor the requests behind it.
Its repository has the authors' recorded requests for such systems and rates (OPT-13B, ShareGPT): arrivals, lengths and
what each saw. Idea: those, judged at the limits of the authors' own comparison, 200 and 100 ms; the plant's engine gets
their coefficients and the schedule of the systems of that time:

- no step is composed while another runs, and there are no chunks,
- vLLM then: prompts that wait go first, by themselves, while all streams stand still,
- DistServe: one engine of two GPUs that reads, one of one GPU that writes; moving KV costs nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from bench.trust.check import Check
from bench.trust.drive import Got, alone, legs, plant
from bench.trust.records import DATA, Seen
from bench.trust.sweeps import within
from plimsoll.sim.blocks import Blocks
from plimsoll.sim.engine import Engine
from plimsoll.sim.meters import Meters
from plimsoll.sim.pace import Pace
from plimsoll.sim.profile import Coefficients, Profile
from plimsoll.sim.steps import Batch, Run
from plimsoll.sim.wire import Wire

TTFT_S: Final = 0.2
TPOT_S: Final = 0.1
POINTS: Final = 2.0
# Both as the authors' simulator has them (simdistserve/base/worker.py).
KV_TOKENS: Final = 50_000
READING: Final = {"vllm": 2_560, "distserve": 8_192}  # most prompt tokens of a step


class Early(Engine):
    """An engine that composes a step when the one before it has ended."""

    in_flight = 1


class PromptsFirst(Early):
    """Reads whole prompts by themselves, while whoever decodes stands still, as vLLM did before chunked prefill."""

    def _compose(self, now_s: float) -> Run | None:
        batch, room = Batch(), self._budget
        while self.waiting and self._slots < self._most and self.waiting[0].prompt <= room:
            first = self.waiting[0]
            self._admit(batch, first.prompt)
            if self.waiting and self.waiting[0] is first:
                break  # there are no blocks for it
            room -= first.prompt
        if not batch.tokens:
            return super()._compose(now_s)
        stretch = self._pace.stretch(self._steps, batch.tokens, batch.pairs, 0, 0)
        run = Run(stretch, max(now_s, self._free_s), now_s, now_s, 1, len(batch.prompts), composed=1)
        run.prompts, run.finals = batch.prompts, batch.finals
        for job in batch.joining:
            self._join(job)
        self._time(run)
        return run


def profile(system: str, reading_gpus: int) -> Profile:
    """One GPU that writes, `reading_gpus` that read: prompts are read and tokens made in different steps."""
    fits = json.loads((DATA / "distserve-a100.json").read_text())[system]["facebook/opt-13b"]
    read, write = fits[str(reading_gpus)]["prefill"], fits["1"]
    few, many = write["decoding_smallbs"], write["decoding_largebs"]
    in_ms = (few[0], read[0] - few[0], read[1], 2 * read[2], few[2], few[1])
    return Profile(
        coefficients=Coefficients(*(ms / 1e3 for ms in in_ms)),
        kv_tokens=KV_TOKENS,
        max_num_seqs=256,
        budget=READING[system],
        block_size=16,
        layers=40,
        max_model_len=2_048,
        kv_bytes_per_token=819_200,
        hinge_sequences=write["decoding_large_small_bs_threshold"],
        hinge_dec=(many[2] - few[2]) / 1e3,
    )


def replay(system: str, seen: Sequence[Seen]) -> list[Got]:
    """What the plant makes of the authors' requests."""
    sent = [one.sent for one in seen]
    if system == "vllm":
        own = plant(profile(system, 1))
        return alone(own, sent, _engine(PromptsFirst, profile(system, 1)))
    hardware = profile(system, 2)
    own = replace(plant(hardware), leg_s=0.0)
    got = legs(own, sent, _engine(PromptsFirst, hardware), _engine(Early, hardware))
    return [replace(each, first_s=each.leg_s) for each in got]  # the reading engine makes the first token


def _engine(kind: type[Engine], own: Profile) -> Engine:
    wire = Wire(own.layers, own.block_size, own.kv_bytes_per_token, math.inf, 0.0, 0.0, 0.0)
    blocks = Blocks(own.kv_tokens // own.block_size, own.block_size)
    return kind(
        own.max_num_seqs, own.budget, blocks, Pace(own, 0.0, Random(0)), wire, Meters(own.max_model_len), leap=False
    )


def checks(records: Mapping[tuple[str, str], Sequence[Seen]]) -> list[Check]:
    found = []
    for (system, rate), seen in records.items():
        got = replay(system, seen)
        real, ours = (100.0 * sum(side) / len(seen) for side in zip(*_kept(seen, got), strict=True))
        told = {"recorded": round(real, 2), "simulated": round(ours, 2)}
        name = f"{system} {rate} req/s a GPU, attainment"
        found.append(Check("DistServe's records on A100s, OPT-13B", name, ours - real, POINTS, "pt", told))
    return found


def _kept(seen: Sequence[Seen], got: Sequence[Got]) -> list[tuple[bool, bool]]:
    return [
        (one.within(TTFT_S, TPOT_S), within(each, one.sent, TTFT_S, TPOT_S))
        for one, each in zip(seen, got, strict=True)
    ]
