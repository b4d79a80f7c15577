"""What a request costs the plant, in GPU seconds, and how fast it is alone: for judging runs, never for deciding."""

from __future__ import annotations

from collections.abc import Iterable

from plimsoll.core.picking.endpoint import Role
from plimsoll.core.slo import Slo
from plimsoll.sim.plant import Plant
from plimsoll.sim.visit import Asked


class Work:
    """Of a fleet of mean, cool replicas in these tiers."""

    def __init__(self, plant: Plant, roles: Iterable[Role]) -> None:
        self._plant = plant
        self._of = {role: plant.of_role(role).coefficients for role in roles}
        self._wire = plant.wire()

    def seconds(self, role: Role, asked: Asked) -> float:
        """In one tier: a U + c U^2 / 2 where the prompt is read, O (d + e (P + O / 2)) where the answer is written."""
        c, prompt, output = self._of[role], asked.prompt_tokens, asked.output_tokens
        read = 0.0 if role is Role.DECODE else prompt * (c.pretok + c.preattn * prompt / 2)
        write = 0.0 if role is Role.PREFILL else output * (c.dec + c.ctx * (prompt + output / 2))
        return read + write

    def whole_s(self, asked: Asked) -> float:
        """In all tiers."""
        return sum(self.seconds(role, asked) for role in self._of)

    def writing_s(self, role: Role, asked: Asked) -> float:
        """How long an idle replica writes the answer."""
        c = self._of[role]
        return asked.output_tokens * (c.base + c.dec + c.ctx * asked.prompt_tokens)

    def feasible_alone(self, slo: Slo, asked: Asked) -> bool:
        """Whether an idle fleet keeps the promise to it: not where it is longer than any engine takes."""
        prompt, output = asked.prompt_tokens, asked.output_tokens
        if prompt + output > self._plant.longest:
            return False
        target_s = ttft_target_s(slo, prompt)
        if target_s is not None and self.first_s(prompt) > target_s:
            return False
        c = next(c for role, c in self._of.items() if role is not Role.PREFILL)
        step_s = c.base + c.dec + c.ctx * (prompt + output / 2)
        if slo.e2e_s is not None and self.first_s(prompt) + max(output - 1, 0) * step_s > slo.e2e_s:
            return False
        return slo.tpot_s is None or output < 2 or step_s <= slo.tpot_s

    def first_s(self, prompt: int) -> float:
        """From its arrival to its first token at an idle fleet."""
        remote = Role.PREFILL in self._of
        c = self._of[Role.PREFILL if remote else Role.SERVE]
        chunks = -(-prompt // self._plant.profile.budget)
        read_s = chunks * (c.base + c.anypre) + prompt * (c.pretok + c.preattn * prompt / 2)
        first_s = self._plant.frontend_s(prompt) + read_s
        if remote:
            d = self._of[Role.DECODE]
            first_s += self._plant.frontend_s(prompt) + 2 * self._plant.leg_s
            first_s += self._wire.post_s(prompt) + self._wire.travel_s(prompt) + d.base + d.dec + d.ctx * prompt
        return first_s


def ttft_target_s(slo: Slo, prompt_tokens: int) -> float | None:
    """The target for the first token of one request."""
    return None if slo.ttft_s is None else slo.ttft_s + slo.ttft_per_1k_tokens_s * prompt_tokens / 1000
