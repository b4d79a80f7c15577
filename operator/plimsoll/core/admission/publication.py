"""The admission limits that the operator publishes to the gateways of one service.

Problem: gateways decide about each request alone, come and go, and must work while the operator is down. The limits
must be the same for all gateways and must not need a write per second.

Idea: one small value in an object that gateways watch. Every gateway reads the same value, a new gateway at once. The
operator writes it only if decisions would change: a model value by a few percent, an expected time, or a share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Final, TypeAlias

from plimsoll.core import codec
from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.cost_model import EngineCostModel
from plimsoll.core.codec import Count, Number, Rounded

FORMAT_VERSION: Final = 4
MIN_RELATIVE_CHANGE: Final = 0.05  # relative change of a cost-model value that triggers a write
MIN_OUTPUT_CHANGE: Final = 0.1  # same, as a share of output tokens that moved
MIN_RATIO_CHANGE: Final = 0.2  # same, for a token ratio
MIN_TIME_CHANGE_S: Final = 3.0  # same, for an expected time
MIN_TOKEN_RATIO: Final = 0.01
MAX_TOKEN_RATIO: Final = 100.0
MAX_CAPACITY_STEPS: Final = 8  # more steps would be within the uncertainty of their times
_UnixTime: TypeAlias = Annotated[float, Number(decimals=1)]
_TokenRatio: TypeAlias = Annotated[float, Number(MIN_TOKEN_RATIO, MAX_TOKEN_RATIO, digits=6)]


@codec.stored_as(
    "admission limits",
    version=FORMAT_VERSION,
    optional=("cost_model", "ready_at_s", "shares", "capacity_steps", "token_ratios", "startup_s"),
    cost_model="costModel",
    ready_at_s="readyAt",
    startup_s="startupSeconds",
    token_ratios="tokenRatios",
    ready_capacity="readyCapacity",
    capacity_steps="capacitySteps",
)
@dataclass(frozen=True)
class AdmissionLimits:
    """The admission limits of one service. Raises ValueError if the cost model has another number of classes.

    - `classes`: class names, in the order of the cost model.
    - `cost_model`: None until an engine has reported its model; then all requests are admitted.
    - `ready_at_s`: Unix time at which the next replica is expected, None if unknown.
    - `ready_capacity`: capacity of all starting replicas, in GPU-seconds of work per second.
    - `starting`: replicas are starting, or will start on demand.
    - `shares`: slots of `cost_model.batch` by gateway. A gateway without an entry uses an equal share, so that it does
      not reject all its requests.
    - `token_ratios`: prompt tokens that engines count over those that gateways estimate, by kind of content
      (`core.demand.token_ratios`). A kind without an entry has 1.
    - `capacity_steps`: (time, capacity from then on), from `ready_at_s` to `ready_capacity`. Empty if all capacity is
      expected at `ready_at_s`.
    - `startup_s`: usual start-up time in seconds of a replica that a request would start, None if it was never
      measured.
    """

    classes: tuple[str, ...]
    cost_model: EngineCostModel | None = None
    ready_at_s: _UnixTime | None = None
    ready_capacity: Rounded = 0.0
    starting: bool = True
    shares: Mapping[str, Count] = field(default_factory=dict)
    capacity_steps: tuple[tuple[_UnixTime, Rounded], ...] = ()
    token_ratios: Mapping[str, _TokenRatio] = field(default_factory=dict)
    startup_s: Annotated[float, Number(decimals=1)] | None = None

    def __post_init__(self) -> None:
        if self.cost_model is not None and len(self.cost_model.tpot_s) != len(self.classes):
            raise ValueError(f"the cost model has {len(self.cost_model.tpot_s)} classes, not {len(self.classes)}")

    def slot_limit(self, gateway: str) -> int:
        """Returns how many sequences of each replica this gateway may use, at least 1; 0 without a cost model."""
        if self.cost_model is None:
            return 0
        others = len(self.shares.keys() - {gateway})
        return self.shares.get(gateway) or max(1, self.cost_model.batch // (others + 1))

    def with_equal_share(self, gateway: str, gateways: int) -> AdmissionLimits:
        """Returns the limits with a share for one of so many gateways, whatever is published for it."""
        if self.cost_model is None:
            return self
        return replace(self, shares={gateway: max(1, self.cost_model.batch // gateways)})

    def after(self, unix_s: float) -> AdmissionLimits:
        """Returns the limits with the expected capacity later than `unix_s` only."""
        if self.ready_at_s is None or self.ready_at_s > unix_s:
            return self
        steps = tuple(step for step in self.capacity_steps if step[0] > unix_s)
        return replace(self, ready_at_s=steps[0][0] if steps else None, capacity_steps=steps)

    def announcement(self, gateway: str, arrival_work_rate: float, clock_offset_s: float) -> CapacityAnnouncement:
        """Returns the expected capacity for one gateway's controller.

        `arrival_work_rate` is the work of its new arrivals in GPU-seconds per second. `clock_offset_s` is its clock
        minus Unix time.
        """
        if self.cost_model is None or (self.ready_at_s is None and self.startup_s is None):
            return CapacityAnnouncement(starting=self.starting, arrival_rate=arrival_work_rate)
        share = min(1.0, self.slot_limit(gateway) / self.cost_model.batch)
        if self.ready_at_s is None:
            spare_rate = max(0.0, share * self.ready_capacity - arrival_work_rate)
            return CapacityAnnouncement(
                None, spare_rate, self.starting, startup_s=self.startup_s, arrival_rate=arrival_work_rate
            )
        (at_s, spare_rate), *later = (
            (at_s + clock_offset_s, max(0.0, share * capacity - arrival_work_rate))
            for at_s, capacity in self.capacity_steps or ((self.ready_at_s, self.ready_capacity),)
        )
        return CapacityAnnouncement(at_s, spare_rate, self.starting, tuple(later), arrival_rate=arrival_work_rate)


def has_changed(old: AdmissionLimits | None, new: AdmissionLimits) -> bool:
    """Whether `new` differs enough from the published `old` to change decisions at a gateway."""
    if old is None or (old.classes, old.starting, old.shares) != (new.classes, new.starting, new.shares):
        return True
    if (old.cost_model is None) != (new.cost_model is None):
        return True
    if _times_differ(old.ready_at_s, new.ready_at_s) or _times_differ(old.startup_s, new.startup_s):
        return True
    if _differs(old.ready_capacity, new.ready_capacity) or len(old.capacity_steps) != len(new.capacity_steps):
        return True
    for (old_at_s, old_capacity), (at_s, capacity) in zip(old.capacity_steps, new.capacity_steps, strict=True):
        if abs(at_s - old_at_s) > MIN_TIME_CHANGE_S or _differs(old_capacity, capacity):
            return True
    if old.token_ratios.keys() != new.token_ratios.keys() or any(
        _differs(old.token_ratios[kind], ratio, MIN_RATIO_CHANGE) for kind, ratio in new.token_ratios.items()
    ):
        return True
    if old.cost_model is None or new.cost_model is None:
        return False
    if _outputs_differ(old.cost_model.output_quantiles, new.cost_model.output_quantiles):
        return True
    return any(
        _differs(old_value, new_value)
        for name in (f.name for f in fields(EngineCostModel) if f.name != "output_quantiles")
        for old_value, new_value in zip(
            _as_tuple(getattr(old.cost_model, name)), _as_tuple(getattr(new.cost_model, name)), strict=True
        )
    )


def _outputs_differ(old: tuple[float, ...], new: tuple[float, ...]) -> bool:
    """Whether the outputs moved by more than `MIN_OUTPUT_CHANGE` (Wasserstein distance over the mean)."""
    if len(old) != len(new):
        return True
    return sum(
        abs(old_tokens - new_tokens) for old_tokens, new_tokens in zip(old, new, strict=True)
    ) > MIN_OUTPUT_CHANGE * sum(old)


def _as_tuple(value: float | tuple[float, ...] | None) -> tuple[float | None, ...]:
    return value if isinstance(value, tuple) else (value,)


def _times_differ(old_s: float | None, new_s: float | None) -> bool:
    if old_s is None or new_s is None:
        return old_s is not new_s
    return abs(new_s - old_s) > MIN_TIME_CHANGE_S


def _differs(old: float | None, new: float | None, relative_change: float = MIN_RELATIVE_CHANGE) -> bool:
    if old is None or new is None:
        return old is not new
    return old != new and not abs(new - old) <= relative_change * min(abs(old), abs(new))
