"""The state of one replica as the gateway estimates it, to predict the effect of one more request.

Problem: the gateway sees only when a request is sent and when it ends. Engines differ from their model: another GPU, a
throttled one, a noisy neighbour. Estimates that drift overload a replica or leave it idle.

Idea: keep sums over the running requests. A request adds its numbers at admission and subtracts exactly the same at its
end. Prefill is a first-come-first-served server, represented by the time when its work ends. Each completed request
measures the step-time ratio: the time of its tokens over the time that the model predicts. This ratio scales all
predictions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from plimsoll.core.admission.cost_model import MIN_SPREAD_TOKENS, EngineCostModel, RequestCost
from plimsoll.core.admission.first_token_reports import REPORT_INTERVAL_S
from plimsoll.core.admission.kv_projection import KvProjection
from plimsoll.core.admission.prefill_queue import RemotePrefill
from plimsoll.core.admission.ttft_residual import TtftResidual

STEP_TIME_WINDOW_S: Final = 60.0  # window of the step-time ratio, in stream seconds per running sequence
STEP_TIME_PRIOR_S: Final = 60.0  # weight of the model against measurements, in stream seconds
STEP_TIME_RATIO_RANGE: Final = (0.5, 4.0)
# How far prefill may run ahead of its share of steps: a fraction of a mean output's time in full steps ...
PREFILL_BURST_SHARE: Final = 0.03
MIN_BURST_STALLS: Final = 3.0  # ... but at least this many mean prefills
SILENT_S: Final = REPORT_INTERVAL_S + 0.5  # after a first token was due and might have been reported
MIN_RETRY_S: Final = 1e-3  # minimum time before a full replica is checked again
_MIN_PREFILL_SHARE: Final = 0.05


@dataclass(slots=True, eq=False)
class RunningRequest:
    """One request on a replica.

    - `predicted_ttft_s`: predicted time from admission to its first token, negative if it already runs for that long.
    - `remote_prefill`: its job at a prefill replica.
    - `utilization`, `ttft_residual_s`: the replica's at admission.
    - `prefilled_at_s`: predicted end of its prefill.
    - `reported_at_s`: when its first token will have been reported, infinite if that is at its end alone.
      `has_first_token`: it has come, and its TTFT is recorded.
    - `stall_s`, `prefill_turn_s`, `scaled_stall_s`: what it added to the replica's `prefill_free_s`, `prefill_tat_s`
      and `stall_total_s`, less what was given back.
    - `start_step`, `stall_total_s`, `decode_integral`: the replica's values at admission.
    - `adapter`: its LoRA adapter, "" for the model itself; `adapter_load_s`: predicted time of its load, None without
      one.
    """

    cost: RequestCost
    class_index: int
    tenant: str
    admitted_s: float
    predicted_ttft_s: float
    remote_prefill: RemotePrefill | None = None
    utilization: float = 0.0
    ttft_residual_s: float = 0.0
    batch_share: float = 1.0  # share of its stay during which it is in the batch
    step_s: float = 0.0  # what it adds to the mean step
    start_step: float = 0.0
    stall_total_s: float = 0.0
    decode_integral: float = 0.0
    prefilled_at_s: float = -math.inf
    stall_s: float = 0.0
    prefill_turn_s: float = 0.0
    scaled_stall_s: float = 0.0
    reported_at_s: float = math.inf
    has_first_token: bool = False
    adapter: str = ""
    adapter_load_s: float | None = None


class ReplicaState:
    """One serve or decode replica. Times are of the controller's clock.

    `inverse_share` is one over this gateway's share of it: other gateways are assumed to send the same load.
    `max_slots` is the number of sequences that this gateway may run there. `utilization` is between 0 and 1.
    `ttft_residual_s` is the expected TTFT beyond the cost model.
    """

    __slots__ = (
        "_advanced_s",
        "_amortised_s",
        "_awaited",
        "_chunk_time_s",
        "_demand_multiplier",
        "_kv_projection",
        "_length_bias",
        "_measured_s",
        "_next_kv_step",
        "_predicted_s",
        "_progress_s",
        "_steps",
        "_ttft_residual",
        "address",
        "cost_model",
        "decode_integral",
        "decode_s",
        "decoding_sequences",
        "idle_step_s",
        "inverse_share",
        "kv_mean_tokens",
        "kv_tokens",
        "load",
        "max_decoding",
        "max_prefill_ahead_s",
        "max_slots",
        "min_step_budget_s",
        "prefill_free_s",
        "prefill_share",
        "prefill_stretch",
        "prefill_tat_s",
        "running",
        "running_per_class",
        "sequence_tokens",
        "sequences",
        "stall_total_s",
        "step_factor",
        "step_s",
        "step_time_ratio",
        "ttft_residual_s",
        "utilization",
    )

    def __init__(self, address: str, cost_model: EngineCostModel, now: float) -> None:
        self.address = address
        self.cost_model = cost_model
        self.running: dict[str, RunningRequest] = {}
        self.running_per_class = [0] * len(cost_model.tpot_s)
        self._awaited: dict[str, RunningRequest] = {}  # requests whose first token will be reported, the oldest first
        self._progress_s = now  # time of the last first token or end of a response
        self.sequences = 0
        self.decoding_sequences = 0.0  # mean number of sequences in the batch; others wait for remote prefill
        self.sequence_tokens = 0.0
        self.kv_mean_tokens = 0.0
        self._amortised_s = 0.0
        self.step_time_ratio = 1.0
        self._ttft_residual = TtftResidual()
        self._measured_s = self._predicted_s = STEP_TIME_PRIOR_S
        self.prefill_free_s = self.prefill_tat_s = now  # end of prefill work; end at its share of steps
        self.stall_total_s = 0.0  # sum of all admitted stalls
        self.decode_integral = 0.0  # integral of the decode step over time
        self._advanced_s = now
        self._steps = 0.0  # steps made so far
        self._next_kv_step = 0.0  # earliest step to admit into KV that only becomes free as others end
        self._kv_projection: KvProjection | None = None  # set while the final KV of all would not fit
        self.decode_s = 0.0
        self.step_s = math.inf
        self.set_share(cost_model.batch, cost_model.batch)

    def set_share(self, slots: int, total_slots: int) -> None:
        """Set this gateway's share: `slots` of the replica's `total_slots`, as published."""
        share = min(1.0, max(slots, 0) / max(total_slots, 1))
        self.max_slots = max(slots, 0)
        self.inverse_share = 1.0 / share if share > 0 else math.inf
        self.kv_tokens = self.cost_model.kv_tokens * share
        self._update_budgets()
        self._update_factors()
        self._update_derived()

    def set_cost_model(self, cost_model: EngineCostModel) -> None:
        """Set a new cost model. What running requests added stays unchanged."""
        share = 1.0 / self.inverse_share
        self._kv_projection = None
        self.cost_model = cost_model
        self.kv_tokens = cost_model.kv_tokens * share
        self._update_budgets()
        self._update_factors()
        self._update_derived()

    def add(self, id: str, running: RunningRequest, now: float) -> None:
        """Add a request that is sent now."""
        self._advance(now)
        cost = running.cost
        running.utilization, running.ttft_residual_s = self.utilization, self.ttft_residual_s
        self.running[id] = running
        if running.reported_at_s < math.inf:
            self._awaited[id] = running
        self.running_per_class[running.class_index] += 1
        if self.running_per_class[running.class_index] == 1:
            self._update_budgets()
        self.sequences += cost.sequences
        self.kv_mean_tokens += cost.kv_mean_tokens
        # It occupies the replica from its admission, but decodes only after its first token.
        tokens = cost.output_tokens / cost.sequences
        if tokens < MIN_SPREAD_TOKENS:
            tokens = MIN_SPREAD_TOKENS
        predicted_ttft_s = running.predicted_ttft_s
        batch_share = tokens / (tokens + predicted_ttft_s / self.min_step_budget_s) if predicted_ttft_s > 0 else 1.0
        running.step_s = cost.step_s * batch_share
        if running.remote_prefill is not None:
            running.batch_share = batch_share
        self.decoding_sequences += cost.sequences * running.batch_share
        self.sequence_tokens += cost.sequence_tokens * running.batch_share
        self._amortised_s += running.step_s
        running.start_step = self._steps
        if self._kv_projection is not None:
            self._project_kv(self._kv_projection, id, running)
            if self._kv_projection.final_tokens() > self.kv_tokens:
                self._next_kv_step = max(self._next_kv_step, self._steps) + self._kv_steps(cost)
        running.stall_s = stall_s = cost.stall_s * self.step_factor
        running.prefill_turn_s = prefill_turn_s = stall_s / self.prefill_share
        running.scaled_stall_s = scaled_stall_s = cost.stall_s * self.inverse_share
        running.prefilled_at_s = self.prefill_free_s = (
            self.prefill_free_s if self.prefill_free_s > now else now
        ) + stall_s
        self.prefill_tat_s = (self.prefill_tat_s if self.prefill_tat_s > now else now) + prefill_turn_s
        self.stall_total_s += scaled_stall_s
        running.stall_total_s = self.stall_total_s
        running.decode_integral = self.decode_integral
        self._update_derived()

    def record_first_token(self, id: str, ttft_s: float, now: float) -> RunningRequest | None:
        """Record that a request had its first token `ttft_s` after its admission. Returns None if that is known.

        Its prompt is computed, so what is still booked for its prefill is given back.
        """
        running = self.running.get(id)
        if running is None or running.has_first_token:
            return None
        running.has_first_token = True
        self._awaited.pop(id, None)
        self._progress_s = max(self._progress_s, running.admitted_s + ttft_s)
        self._cancel_prefill(running, now)
        if running.remote_prefill is None and running.adapter_load_s is None:  # others track the lateness of these
            self._ttft_residual.observe(
                ttft_s - running.predicted_ttft_s + running.ttft_residual_s, running.utilization, now
            )
            self.ttft_residual_s = self._ttft_residual.expected_s(self.utilization)
        return running

    def remove(
        self, id: str, now: float, output_tokens: int | None = None, ttft_s: float | None = None
    ) -> RunningRequest | None:
        """Remove a request that ended or was cancelled. Returns None if it is unknown.

        `output_tokens` are those of all its sequences, `ttft_s` is from its admission. If both are known, they update
        the step-time ratio. What is still booked for its prefill is given back.
        """
        running = self.running.pop(id, None)
        if running is None:
            return None
        self._awaited.pop(id, None)
        if ttft_s is not None:
            self._progress_s = now
        self._advance(now)
        cost = running.cost
        self.running_per_class[running.class_index] -= 1
        if not self.running_per_class[running.class_index]:
            self._update_budgets()
        self.sequences -= cost.sequences
        if self._kv_projection is not None:
            self._kv_projection.remove(id)
        if not self.running:  # prevents accumulated rounding errors
            self._kv_projection = None
            self.decoding_sequences = self.sequence_tokens = self.kv_mean_tokens = self._amortised_s = 0.0
        else:
            self.decoding_sequences = max(0.0, self.decoding_sequences - cost.sequences * running.batch_share)
            self.sequence_tokens = max(0.0, self.sequence_tokens - cost.sequence_tokens * running.batch_share)
            self.kv_mean_tokens = max(0.0, self.kv_mean_tokens - cost.kv_mean_tokens)
            self._amortised_s = max(0.0, self._amortised_s - running.step_s)
        self._cancel_prefill(running, now)
        if ttft_s is not None and output_tokens is not None:
            self._update_step_time(running, output_tokens, ttft_s, now)
        self._update_derived()
        return running

    def _cancel_prefill(self, ended: RunningRequest, now: float) -> None:
        """Cancel the predicted rest of a prefill that ended, so that later requests start earlier."""
        remaining_s = min(ended.stall_s, ended.prefilled_at_s - now)
        if remaining_s <= 0.0:
            return
        fraction = remaining_s / ended.stall_s
        turn_s, scaled_stall_s = fraction * ended.prefill_turn_s, fraction * ended.scaled_stall_s
        queued_after_s = ended.stall_total_s
        self.prefill_free_s -= remaining_s
        self.prefill_tat_s -= turn_s
        self.stall_total_s -= scaled_stall_s
        ended.stall_s -= remaining_s
        ended.prefill_turn_s -= turn_s
        ended.scaled_stall_s -= scaled_stall_s
        for other in self.running.values():
            if other.stall_total_s >= queued_after_s:  # itself while it runs, and those queued behind it
                other.prefilled_at_s -= remaining_s
                other.stall_total_s -= scaled_stall_s

    def _update_step_time(self, running: RunningRequest, output_tokens: int, ttft_s: float, now: float) -> None:
        """Update the step-time ratio from a request that has just ended and is already removed.

        The predicted time of its tokens is the time of their steps at the mean batch during its stay, plus the stalls
        admitted meanwhile.
        """
        tokens = output_tokens / running.cost.sequences - 1
        stay_s = now - running.admitted_s
        decode_s = stay_s - ttft_s
        if not (tokens >= 1 and 0 <= ttft_s < stay_s and decode_s > 0):
            return
        share = decode_s / stay_s
        predicted_s = share * (self.stall_total_s - running.stall_total_s)
        predicted_s += tokens * (self.decode_integral - running.decode_integral) / stay_s
        if not 0 < predicted_s < math.inf:
            return
        window_s = STEP_TIME_WINDOW_S * max(self.sequences, 1) * self.inverse_share
        decay = max(0.0, 1.0 - decode_s / window_s)
        self._measured_s = decay * self._measured_s + decode_s
        self._predicted_s = decay * self._predicted_s + predicted_s
        low, high = STEP_TIME_RATIO_RANGE
        self.step_time_ratio = min(max(self._measured_s / self._predicted_s, low), high)
        self._update_factors()

    def room_at_s(self, cost: RequestCost, budget_s: float, max_utilization: float, now: float) -> float:
        """Returns when there is room for one more request: 0 for now, infinity if not before a request ends.

        With it, all requests must stay within their targets, and KV must hold all until they end, at a high quantile of
        the sum. `budget_s` is the step budget of its class, `max_utilization` (0 to 1) its utilization limit. An idle
        replica accepts any request that fits, because waiting would find no better one.
        """
        if not self.max_slots:
            return math.inf
        if not self.sequences:  # what fits the engine may exceed this gateway's share of it
            return 0.0 if cost.prompt_tokens < self.cost_model.kv_tokens else math.inf
        if self.decoding_sequences + cost.sequences > self.max_decoding * max_utilization:
            return math.inf
        allowed_s = self.min_step_budget_s if self.min_step_budget_s < budget_s else budget_s
        step_s = self.step_s + cost.step_s * self.step_factor
        if max_utilization < 1.0:
            step_s += (1.0 - max_utilization) * (allowed_s - self.idle_step_s)
        if step_s > allowed_s:
            return math.inf
        kv_room = self.kv_tokens * max_utilization
        if self._kv_projection is None and (self.kv_mean_tokens + cost.kv_mean_tokens) * self._length_bias <= kv_room:
            return 0.0
        return self._kv_room_at_s(cost, kv_room, now)

    def _kv_room_at_s(self, cost: RequestCost, kv_room: float, now: float) -> float:
        """Returns when `kv_room` tokens have room: for all requests at their final size, or until each has ended.

        Room of the second kind is handed out at the rate at which running requests release it on average: tokens times
        steps. Requests admitted together end together, so otherwise there would be none until then.
        """
        step = self._steps + max(0.0, now - self._advanced_s) / self.step_s
        projection = self._kv_projection
        if projection is None:
            projection = self._kv_projection = KvProjection(self.cost_model)
            for id, running in self.running.items():
                self._project_kv(projection, id, running)
        projection.advance(step)
        if projection.final_tokens(cost) <= kv_room:
            return 0.0
        if cost.kv_mean_tokens > kv_room:
            return math.inf
        steps = self._next_kv_step - step
        if steps <= 0.0:
            if projection.peak_tokens(cost) <= kv_room:
                return 0.0
            steps = self._kv_steps(cost)
        return max(now + steps * self.step_s, now + MIN_RETRY_S)

    def _project_kv(self, projection: KvProjection, id: str, running: RunningRequest) -> None:
        """Add a request to the projection."""
        projection.add(id, running.cost, running.start_step + running.predicted_ttft_s / self.step_s, self._steps)

    def _kv_steps(self, cost: RequestCost) -> float:
        """Returns how many steps of the whole KV cache a request takes: its mean KV share times its steps."""
        return cost.output_tokens / cost.sequences * (cost.kv_mean_tokens - cost.output_tokens / 2) / self.kv_tokens

    def predict_ttft_s(self, cost: RequestCost, now: float) -> float:
        """Returns the predicted TTFT of a request admitted now, in seconds.

        It is the rest of the current step and the whole next one (two are in flight), then all prefill ahead and its
        own, in steps that also decode.
        """
        prefill_ahead_s = self.prefill_free_s - now
        wait_s = prefill_ahead_s * self.prefill_stretch if prefill_ahead_s > 0 else 0.0
        steps = 0.5 + cost.prefill_chunks
        return (
            wait_s + steps * self.decode_s + cost.stall_s * self.step_time_ratio + cost.network_s + self.ttft_residual_s
        )

    def silence_s(self, now: float) -> float:
        """Returns for how long nothing has come while a first token was due, 0 up to `SILENT_S` and its report.

        A hung engine would else look idle, as its booked prefill runs down, and get most requests until it is unready.
        """
        if not self._awaited:
            return 0.0
        oldest = next(iter(self._awaited.values()))
        silence_s = now - max(oldest.admitted_s + oldest.predicted_ttft_s, self._progress_s)
        return silence_s if silence_s > SILENT_S and now > oldest.reported_at_s else 0.0

    def _advance(self, now: float) -> None:
        if now > self._advanced_s:
            self.decode_integral += (now - self._advanced_s) * self.decode_s / self.step_time_ratio
            self._steps += (now - self._advanced_s) / self.step_s
            self._advanced_s = now

    def _update_factors(self) -> None:
        """Recompute what depends on step-time ratio and share. Call `_update_derived` next."""
        cost_model, ratio, slots = self.cost_model, self.step_time_ratio, self.max_slots
        self._demand_multiplier = self.inverse_share if slots else 1.0  # requests of all gateways per own request
        self.step_factor = ratio * self._demand_multiplier
        self.idle_step_s = ratio * cost_model.base_s
        # The share comes from the model. A replica that is faster holds more sequences within the same step time.
        self.max_decoding = (
            min(slots * self._extra_capacity(), cost_model.max_sequences / self._demand_multiplier) if slots else 0.0
        )
        self._chunk_time_s = cost_model.chunk_s * ratio
        # Length bias: in equilibrium running requests are sampled in proportion to their length.
        self._length_bias = (
            1.0 + cost_model.output_variance / cost_model.output_mean**2 if cost_model.output_mean > 0.0 else 1.0
        )

    def _extra_capacity(self) -> float:
        """Returns the factor of extra sequences that a faster replica holds within the same step, at least 1."""
        budget_s, base_s = max(self.cost_model.step_budget_s), self.cost_model.base_s
        if self.step_time_ratio >= 1.0:
            return 1.0
        if not base_s < budget_s < math.inf:
            return 1.0 / self.step_time_ratio
        return (budget_s / self.step_time_ratio - base_s) / (budget_s - base_s)

    def _update_derived(self) -> None:
        """Recompute the values that admission checks read."""
        cost_model = self.cost_model
        sequences_s = cost_model.sequence_s * self.decoding_sequences + cost_model.cached_token_s * self.sequence_tokens
        self.decode_s = decode_s = self.step_time_ratio * (cost_model.base_s + self._demand_multiplier * sequences_s)
        self.step_s = self.idle_step_s + self.step_factor * self._amortised_s
        self.load = self.step_s if self.max_slots else math.inf
        self.prefill_stretch = 1.0 + decode_s / self._chunk_time_s
        share = 1.0 - decode_s / self.min_step_budget_s
        self.prefill_share = share if share > _MIN_PREFILL_SHARE else _MIN_PREFILL_SHARE
        self.utilization = min(1.0, self.decoding_sequences / self.max_decoding) if self.max_decoding > 0.0 else 0.0
        self.ttft_residual_s = self._ttft_residual.expected_s(self.utilization)

    def _update_budgets(self) -> None:
        """Recompute the tightest step budget of the running classes."""
        cost_model = self.cost_model
        budgets_s = [
            budget_s for budget_s, count in zip(cost_model.step_budget_s, self.running_per_class, strict=True) if count
        ]
        self.min_step_budget_s = min(budgets_s) if budgets_s else math.inf
        # Gateways rarely burst together, so each may burst by the square root of their number beyond its share.
        burst_s = max(
            PREFILL_BURST_SHARE * cost_model.output_mean * self.min_step_budget_s, MIN_BURST_STALLS * cost_model.stall_s
        )
        self.max_prefill_ahead_s = burst_s * (math.sqrt(self.inverse_share) if self.inverse_share < math.inf else 1.0)
