"""Cost of a request on the plant in GPU-seconds, and its latency alone: for evaluation of runs, never for decisions."""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.plant import Plant


class RequestCostModel:
    """Costs in a fleet of mean, cool replicas in these tiers."""

    def __init__(self, plant: Plant, roles: Iterable[Role]) -> None:
        self._plant = plant
        self._coefficients = {role: plant.profile_for(role).coefficients for role in roles}
        self._kv_link = plant.kv_link()

    def cost_s(self, role: Role, request: TraceRequest) -> float:
        """Cost in one tier: a U + c U^2 / 2 for the prefill, O (d + e (P + O / 2)) for decoding."""
        c, prompt, output = self._coefficients[role], request.prompt_tokens, request.output_tokens
        prefill_s = 0.0 if role is Role.DECODE else prompt * (c.pretok + c.preattn * prompt / 2)
        decode_s = 0.0 if role is Role.PREFILL else output * (c.dec + c.ctx * (prompt + output / 2))
        return prefill_s + decode_s

    def total_s(self, request: TraceRequest) -> float:
        """Cost in all tiers."""
        return sum(self.cost_s(role, request) for role in self._coefficients)

    def decode_s(self, role: Role, request: TraceRequest) -> float:
        """Decode time of the response on an idle replica."""
        c = self._coefficients[role]
        return request.output_tokens * (c.base + c.dec + c.ctx * request.prompt_tokens)

    def feasible_alone(self, slo: Slo, request: TraceRequest) -> bool:
        """Whether an idle fleet meets the SLO for it; False if it is longer than any engine accepts."""
        prompt, output = request.prompt_tokens, request.output_tokens
        if prompt + output > self._plant.max_sequence_tokens:
            return False
        if self.unloaded_ttft_s(prompt) > slo.ttft_target_s(prompt):
            return False
        c = next(c for role, c in self._coefficients.items() if role is not Role.PREFILL)
        step_s = c.base + c.dec + c.ctx * (prompt + output / 2)
        if slo.e2e_s is not None and self.unloaded_ttft_s(prompt) + max(output - 1, 0) * step_s > slo.e2e_s:
            return False
        return slo.tpot_s is None or output < 2 or step_s <= slo.tpot_s

    def unloaded_ttft_s(self, prompt: int) -> float:
        """TTFT on an idle fleet."""
        remote = Role.PREFILL in self._coefficients
        c = self._coefficients[Role.PREFILL if remote else Role.SERVE]
        chunks = -(-prompt // self._plant.profile.budget)
        prefill_s = chunks * (c.base + c.anypre) + prompt * (c.pretok + c.preattn * prompt / 2)
        ttft_s = self._plant.frontend_s(prompt) + prefill_s
        if remote:
            d = self._coefficients[Role.DECODE]
            ttft_s += self._plant.frontend_s(prompt) + 2 * self._plant.remote_prefill_http_s
            ttft_s += self._kv_link.post_s(prompt) + self._kv_link.transfer_s(prompt) + d.base + d.dec + d.ctx * prompt
        return ttft_s
