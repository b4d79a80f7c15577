"""What is remembered of one tier: how fast its engines are, how long they take to start, what comes to them.

Problem: the reduction of a tier to its load line takes milliseconds, and its inputs move a little at every scrape.

Idea: the line is kept until an input has moved by more than the line's own doubt, and looked at only now and then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from plimsoll.core import ladder
from plimsoll.core.calibration.answer import pessimistic
from plimsoll.core.calibration.belief import Posterior, unknown
from plimsoll.core.calibration.replicas import Replicas
from plimsoll.core.calibration.state import EngineKey
from plimsoll.core.calibration.update import refusal, update_all
from plimsoll.core.calibration.window import WindowSums, filled, lengths_of
from plimsoll.core.forecast import Unknown
from plimsoll.core.forecast.noise import dispersion
from plimsoll.core.forecast.state import State, rescaled
from plimsoll.core.knee import HTTP_S, HTTP_TOKEN_S, pace
from plimsoll.core.knee import Tier as Sized
from plimsoll.core.latency import EngineLimits, KvTransfer, StepModel, TierWork, decode_tier, serve_tier
from plimsoll.core.lifecycle import Ledger, prior
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import About
from plimsoll.core.scaling import Line
from plimsoll.core.sizing import Infeasible
from plimsoll.core.slo import Slo
from plimsoll.core.variants import Ledgers
from plimsoll.core.workload import Workload

PESSIMISM: Final = 0.75  # quantile of the posterior to size on: of the models believed one in four is slower
GAP_MEMORY_S: Final = 600.0  # of the steps that gaps are reckoned with
LOOK_S: Final = 5.0  # between two looks at whether the line still holds
MOVED: Final = 0.03  # an input that has moved by this share makes the line anew
BUNCHED: Final = 0.1  # or, of how arrivals bunch, by this: half of a wait is the services', and a line moves by less

# Where an engine does not tell: vLLM's own defaults, and a cache that does not bind.
MAX_SEQUENCES: Final = 256
TOKEN_BUDGET: Final = 8192
KV_TOKENS: Final = 1 << 24
BLOCK_TOKENS: Final = 16
LAYERS: Final = 32

# A start of which nothing is known: a 10 GB image over 1 GB/s, 16 GB of weights from a volume at 2 GB/s.
FIRST_LEDGER: Final = prior(10e9, 0.0, 16e9, 1e9, 2e9)

_TELLING: Final = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
NO_STARTS: Final = Ledgers(FIRST_LEDGER)
NO_DEMAND: Final = State()
NO_ENGINE: Final = Unknown("no engine of the tier has told what it is yet")


@dataclass(frozen=True, slots=True)
class _Basis:
    """What a line was made from, in figures that can be compared. base_s: of a step; work_s: of a mean request. pace_s:
    what the promise of whole answers leaves for each token, 0 where there is none: the tail of the lengths is in it.
    stall_s: root mean square of a request's stall where gaps are promised, else 0, in which is that of the prompts.
    arrival_cv2: as of `knee.Tier`."""

    slo: Slo
    limits: EngineLimits
    base_s: float
    work_s: float
    output_tokens: float
    tail_scale: float
    elsewhere_s: float
    pace_s: float
    stall_s: float
    arrival_cv2: float
    gateways: int

    def holds_for(self, other: _Basis) -> bool:
        same = (self.slo, self.limits, self.arrival_cv2, self.gateways)
        if same != (other.slo, other.limits, other.arrival_cv2, other.gateways):
            return False
        pairs = (
            (self.base_s, other.base_s),
            (self.work_s, other.work_s),
            (self.output_tokens, other.output_tokens),
            (self.tail_scale, other.tail_scale),
            (self.pace_s, other.pace_s),
            (self.stall_s, other.stall_s),
        )
        moved = any(abs(new - old) > MOVED * old for old, new in pairs)
        return not moved and abs(other.elsewhere_s - self.elsewhere_s) <= MOVED * (self.slo.ttft_s or 1.0)


@dataclass
class Tier:
    """Lives as long as its service. line: what sizing uses; Unknown says what is missing."""

    role: Role
    starts: Ledgers = NO_STARTS
    demand: State = NO_DEMAND
    key: EngineKey | None = None
    posterior: Posterior | None = None
    limits: EngineLimits | None = None
    layers: int = LAYERS
    block_tokens: int = BLOCK_TOKENS
    line: Line | Unknown = NO_ENGINE
    watched_s: float = -math.inf  # when the first arrivals were seen, where none were known before
    at: WindowSums | None = None  # the newest usable window: the load to be pessimistic about
    looked_s: float = -math.inf  # when it was last looked at whether the line still holds
    sized: Sized | None = None  # what the line was made from
    replicas: Replicas = field(default_factory=Replicas, repr=False)  # how fast each is beside the others
    _arrival_cv2: float = field(default=1.0, repr=False)
    _basis: _Basis | None = field(default=None, repr=False)
    _model: tuple[Posterior, WindowSums | None, StepModel] | None = field(default=None, repr=False)
    _start: tuple[Ledgers, float] | None = field(default=None, repr=False)
    _even: tuple[float, float, StepModel] | None = field(default=None, repr=False)  # since when, until, their mean

    @property
    def ledger(self) -> Ledger:
        """Start-up times of what is ordered now."""
        return self.starts.ledger

    @property
    def start_s(self) -> float:
        """The ledger's horizon, seconds."""
        if self._start is None or self._start[0] is not self.starts:
            self._start = self.starts, self.ledger.horizon_s
        return self._start[1]

    def meet(self, about: About) -> None:
        """An engine has said what it is. One of another build, model or accelerator begins anew."""
        config = about.config or {}
        told = about.max_sequences, about.kv_tokens, about.token_budget
        defaults = MAX_SEQUENCES, KV_TOKENS, TOKEN_BUDGET
        self.limits = EngineLimits(*(value or default for value, default in zip(told, defaults, strict=True)))
        self.block_tokens = about.block_tokens or BLOCK_TOKENS
        layers = config.get("num_hidden_layers")
        self.layers = layers if isinstance(layers, int) and layers > 0 else LAYERS
        key = engine_key(about)
        if self.posterior is not None and key == self.key:
            return
        chosen = ladder.choose(about)
        if isinstance(chosen, Unknown):
            if self.posterior is None:
                self.line = chosen
            return
        self.key, self.posterior, self.at, self.replicas = key, unknown(*chosen), None, Replicas()
        self.looked_s, self._basis, self.sized, self._even = -math.inf, None, None, None

    def learn(self, windows: Sequence[WindowSums], workload: Workload | Unknown) -> None:
        """Take in what engines did, with the lengths of the requests that they did it for."""
        if self.posterior is None or self.limits is None or not windows or isinstance(workload, Unknown):
            return
        lengths = lengths_of(workload, self.limits.token_budget)
        known = [filled(window, lengths) for window in windows]
        known = [window for window in known if refusal(self.posterior, window) is None]
        if known:
            self.posterior, self.at = update_all(self.posterior, known, self.replicas), known[-1]

    @property
    def model(self) -> StepModel | None:
        """What the tier is sized on: pessimistic until engines have told."""
        posterior, at = self.posterior, self.at
        if posterior is None:
            return None
        if self._model is None or self._model[0] is not posterior or self._model[1] is not at:
            usable = at is not None and refusal(posterior, at) is None
            self._model = posterior, at, pessimistic(posterior, PESSIMISM, at if usable else None)
        return self._model[2]

    def due(self, now_s: float) -> bool:
        """Is it time to look whether the line still holds?"""
        return not 0.0 <= now_s - self.looked_s < LOOK_S

    def draft(
        self,
        now_s: float,
        slo: Slo,
        workload: Workload,
        tail_scale: float,
        elsewhere_s: float,
        gateways: int,
    ) -> Sized | None:
        """What the line is to be made from, for `redraw`; None where it holds, or where it cannot be made."""
        self.looked_s = now_s
        model, limits = self.model, self.limits
        if model is None or limits is None:
            return None
        if self.role is Role.PREFILL and slo.ttft_s is None:
            self.line = Unknown("slo.ttft is needed to size a prefill tier")
            return None
        sized = Sized(
            self.role,
            model,
            workload,
            limits,
            slo,
            transfer=self.transfer if self.role is Role.DECODE else None,
            tail_scale=tail_scale,
            arrival_cv2=self.bunched(),
            elsewhere_s=elsewhere_s,
            gap_model=None if slo.itl_s is None else self.averaged(model, now_s),
            gateways=gateways,
        )
        basis = self._based_on(sized)
        if self._basis is not None and self._basis.holds_for(basis):
            return None
        self._basis, self.sized = basis, sized
        return sized

    def redraw(self, made: Line | Infeasible) -> None:
        """The line has been made from the last draft."""
        if isinstance(made, Line) and isinstance(self.line, Line):  # the work of before, by what is known of it now
            self.demand = rescaled(self.demand, made.request_gpu_s / self.line.request_gpu_s)
        self.line = made if isinstance(made, Line) else _hopeless(made)

    def _based_on(self, sized: Sized) -> _Basis:
        work, workload = self._work(sized.model, sized.workload), sized.workload
        return _Basis(
            sized.slo,
            sized.limits,
            sized.model.base_s,
            work.work_s,
            workload.mean(workload.output_tokens),
            sized.tail_scale,
            sized.elsewhere_s,
            0.0 if sized.slo.e2e_s is None or math.isinf(pace(sized)[0]) else pace(sized)[0],
            0.0 if sized.gap_model is None else _stall_s(self._work(sized.gap_model, workload)),
            sized.arrival_cv2,
            sized.gateways,
        )

    def averaged(self, model: StepModel, now_s: float) -> StepModel:
        """The mean of the last ten minutes' models. How work divides into prompts and answers is what engines' totals
        tell least of: models that agree on the work of a request swing by a quarter in it, within a minute or two."""
        if self._even is None or now_s < self._even[1]:
            self._even = now_s, now_s, model
        since_s, until_s, mean = self._even
        if now_s > until_s:
            share = (now_s - until_s) / min(now_s - since_s, GAP_MEMORY_S)
            self._even = since_s, now_s, mean.towards(model, min(share, 1.0))
        return self._even[2]

    @property
    def arrival_cv2(self) -> float:
        """Of the gaps between arrivals, as the line has it; 1 while there is none."""
        return 1.0 if self._basis is None else self._basis.arrival_cv2

    def bunched(self) -> float:
        """The same as it is measured over seconds; samples are of arrivals, each with the work of the mix. The last
        figure holds until it has moved by BUNCHED."""
        if not isinstance(self.line, Unknown) and self.demand.at_s is not None:
            found = dispersion(self.demand.noise, self.line.request_gpu_s)
            if abs(found - self._arrival_cv2) > BUNCHED * self._arrival_cv2:
                self._arrival_cv2 = found
        return self._arrival_cv2

    @property
    def transfer(self) -> KvTransfer:
        """What receiving KV costs; an engine that was watched while it received has it in its own steps already."""
        if self.at is not None:
            return KvTransfer(self.layers, self.block_tokens, step_factor=1.0)
        return KvTransfer(self.layers, self.block_tokens)

    def leg_s(self, workload: Workload) -> float:
        """What a mean request spends of its TTFT in this tier, for the other tier's sake."""
        model = self.model
        if model is None or self.limits is None:
            return 0.0
        if self.role is Role.DECODE:
            posted = workload.mean(self.transfer.post_s(workload.uncached_tokens))
            return model.base_s + posted
        prefill = model.prefill_s(workload.uncached_tokens, workload.cached_tokens, self.limits.token_budget)
        return workload.mean(prefill) + HTTP_S + HTTP_TOKEN_S * workload.mean(workload.prompt_tokens)

    def _work(self, model: StepModel, workload: Workload) -> TierWork:
        if self.role is Role.DECODE:
            return decode_tier(model, workload, self.transfer)
        return serve_tier(model, workload)


def _stall_s(work: TierWork) -> float:
    return math.sqrt(work.workload.moment(work.stall_s, 2))


def engine_key(about: About) -> EngineKey:
    """What a calibration holds for, as far as the engine tells."""
    config = about.config or {}
    model = " ".join(f"{name}={config[name]}" for name in _TELLING if name in config) or "model not told"
    return EngineKey(model, about.accelerator, f"{about.gpus} GPUs", f"{about.engine} {about.engine_version}")


def _hopeless(made: Infeasible) -> Unknown:
    return Unknown(f"no number of replicas keeps the promise, nor any looser one: {made.constraint} breaks it")


def spent_elsewhere_s(tiers: Sequence[Tier], tier: Tier, workload: Workload) -> float:
    """What a mean request spends of its TTFT in the other tiers, seconds."""
    return math.fsum(other.leg_s(workload) for other in tiers if other is not tier)


def without_posting(windows: Sequence[WindowSums], post_share: float | Unknown) -> list[WindowSums]:
    """Windows of a decode engine with the time taken out in which it posted KV reads: that is reckoned apart."""
    if isinstance(post_share, Unknown) or not 0.0 < post_share < 1.0:
        return list(windows)
    lost = KvTransfer(1, 1).lost_share * post_share
    return [replace(window, busy_s=window.busy_s * (1.0 - lost)) for window in windows]
