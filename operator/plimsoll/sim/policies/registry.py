"""Registry of all policies by name: how each is built from its options, and which options a search tries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies import aibrix, clairvoyant, dynamo, hpa_policies, keda, knative, reactive, wva, wva_queueing
from plimsoll.sim.policies.base import PlimsollPolicy, PolicyContext, SimulatedPolicy, StaticPolicy
from plimsoll.sim.policies.options import PolicyOptions, parse_replicas


class PolicyFamily(NamedTuple):
    """make: reads its options and rejects the rest; raises BadInput. settings: the options (without the name) that a
    search for the best setting tries; "" for the defaults. None for the clairvoyant policy, whose plans belong to a
    trace.
    """

    make: Callable[[PolicyOptions, PolicyContext], SimulatedPolicy]
    settings: Callable[[], Sequence[str]]


def _plimsoll(options: PolicyOptions, context: PolicyContext) -> SimulatedPolicy:
    options.finish()
    return PlimsollPolicy()


def _static(options: PolicyOptions, context: PolicyContext) -> SimulatedPolicy:
    """Options K, or P,D; with gated=1 the operator's model decides about admission."""
    gated = options.flag("gated", False)
    options.finish(allow_positional=True)
    return StaticPolicy(parse_replicas(options.positional, context.bounds, options.origin), gated)


def _default_only() -> Sequence[str]:
    return ("",)


COMPARISONS: Final = ("clairvoyant", "follower-frontier", "hindsight")  # stand for policies (`sim.frontier`)
_FAMILIES: Final[Mapping[str, PolicyFamily]] = {
    "plimsoll": PolicyFamily(_plimsoll, _default_only),
    "static": PolicyFamily(_static, _default_only),
    "follower": PolicyFamily(reactive.make, reactive.settings),
    "clairvoyant": PolicyFamily(clairvoyant.make, tuple),
    "hpa-queue": PolicyFamily(hpa_policies.make_queue, hpa_policies.queue_settings),
    "hpa-concurrency": PolicyFamily(hpa_policies.make_concurrency, hpa_policies.concurrency_settings),
    "keda-ttft": PolicyFamily(keda.make, keda.settings),
    "kpa": PolicyFamily(knative.make, knative.settings),
    "apa": PolicyFamily(aibrix.make, aibrix.settings),
    "wva": PolicyFamily(wva.make, wva.settings),
    "wva-queueing": PolicyFamily(wva_queueing.make, wva_queueing.settings),
    "dynamo-throughput": PolicyFamily(dynamo.make_throughput, dynamo.settings_throughput),
    "dynamo-load": PolicyFamily(dynamo.make_load, dynamo.settings_load),
}


def names() -> Sequence[str]:
    return tuple(_FAMILIES)


def parse(text: str, context: PolicyContext) -> SimulatedPolicy:
    """`name` or `name:key=value,...`. Raises BadInput."""
    name, _, rest = text.partition(":")
    if name not in _FAMILIES:
        raise BadInput(f"--policy {text!r} is none of {', '.join(dict.fromkeys((*_FAMILIES, *COMPARISONS)))}")
    policy = _FAMILIES[name].make(PolicyOptions(f"--policy {text}", rest), context)
    if not context.takes_requests and policy.runs_operator and not isinstance(policy, PlimsollPolicy):
        raise BadInput(
            f"--policy {text}: needs admission control, which targets without a port do not have: set gated=0, or "
            "spec.targets.serve.port"
        )
    return policy


def search_space(name: str) -> Sequence[str]:
    """Return the policy texts that a search for its best setting tries."""
    return tuple(f"{name}:{option_text}" if option_text else name for option_text in _FAMILIES[name].settings())
