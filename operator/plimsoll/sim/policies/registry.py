"""All policies by their names: how each is made of its words, and which words are worth trying."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies import aibrix, clairvoyant, dynamo, follower, horizontal, keda, knative, wva, wva_queueing
from plimsoll.sim.policies.base import Plimsoll, Policy, Scene, Static
from plimsoll.sim.policies.options import Options, replicas


class Family(NamedTuple):
    """make: takes what it knows from the options and refuses the rest; raises BadInput. settings: the option words
    (without the name) that a search for the best setting tries; "" stands for the defaults. None for the clairvoyant,
    whose plans are those of a trace."""

    make: Callable[[Options, Scene], Policy]
    settings: Callable[[], Sequence[str]]


def _plimsoll(options: Options, scene: Scene) -> Policy:
    options.end()
    return Plimsoll()


def _static(options: Options, scene: Scene) -> Policy:
    """K, or P,D; gated=1 lets the operator's model decide about admission all the same."""
    gated = options.flag("gated", False)
    options.end(plain=True)
    return Static(replicas(options.words, scene.bounds, options.place), gated)


def _alone() -> Sequence[str]:
    return ("",)


COMPARISONS: Final = ("clairvoyant", "follower-frontier", "hindsight")  # stand for policies (`sim.frontier`)
_FAMILIES: Final[Mapping[str, Family]] = {
    "plimsoll": Family(_plimsoll, _alone),
    "static": Family(_static, _alone),
    "follower": Family(follower.make, follower.settings),
    "clairvoyant": Family(clairvoyant.make, tuple),
    "hpa-queue": Family(horizontal.queue, horizontal.queue_settings),
    "hpa-concurrency": Family(horizontal.concurrency, horizontal.concurrency_settings),
    "keda-ttft": Family(keda.make, keda.settings),
    "kpa": Family(knative.make, knative.settings),
    "apa": Family(aibrix.make, aibrix.settings),
    "wva": Family(wva.make, wva.settings),
    "wva-queueing": Family(wva_queueing.make, wva_queueing.settings),
    "dynamo-throughput": Family(dynamo.make_throughput, dynamo.settings_throughput),
    "dynamo-load": Family(dynamo.make_load, dynamo.settings_load),
}


def names() -> Sequence[str]:
    return tuple(_FAMILIES)


def parse(text: str, scene: Scene) -> Policy:
    """`name` or `name:key=value,...`. Raises BadInput."""
    name, _, rest = text.partition(":")
    if name not in _FAMILIES:
        raise BadInput(f"--policy {text!r} is none of {', '.join(dict.fromkeys((*_FAMILIES, *COMPARISONS)))}")
    return _FAMILIES[name].make(Options(f"--policy {text}", rest), scene)


def search(name: str) -> Sequence[str]:
    """The policy's words, name included, that a search for its best setting tries."""
    return tuple(f"{name}:{words}" if words else name for words in _FAMILIES[name].settings())
