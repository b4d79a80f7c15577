"""`plimsoll simulate`: a trace against a service, on a fleet in virtual time, with Plimsoll's own decisions or others'.

Nothing is asked of a cluster. The manifest is the cluster's; what an engine can do comes from a hardware profile, and
the manifest's engine arguments that change its limits hold here too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, TextIO, cast

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import InferenceService, parse
from plimsoll.cli import simulated
from plimsoll.cli.files import apart, empty, opened, say
from plimsoll.cli.manifests import documents
from plimsoll.cli.output import Screen
from plimsoll.cli.simulated import Run
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.slo import Slo
from plimsoll.resources import arguments as engine_arguments
from plimsoll.sim import frontier, profile, startup, trace
from plimsoll.sim.clients import Manner
from plimsoll.sim.errors import BadInput
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import Bounds, Look, Policy, Scene
from plimsoll.sim.policies.options import replicas
from plimsoll.sim.result import Result, decision_rows, replica_rows
from plimsoll.sim.screen import Ground
from plimsoll.sim.setting import Setting
from plimsoll.sim.timeline import Timeline
from plimsoll.sim.visit import Asked, Visit
from plimsoll.sim.world import World

_FLAGS: Final = {
    "--max-num-seqs": "max_num_seqs",
    "--max-num-batched-tokens": "budget",
    "--block-size": "block_size",
    "--max-model-len": "max_model_len",
}
_DISAGGREGATED_BLOCK: Final = 128  # what the operator starts prefill and decode engines with
_CHUNK: Final = 512  # prompt tokens that one of a trace's hash_ids stands for
_STRANGE: Final = 10  # unknown priorities that are named
_AUTO: Final = ("auto", "-1")  # vLLM looks for itself what fits
_MOST_TOKENS: Final = 10**12  # of an engine's limits
_MOST_GATEWAYS: Final = 1000
_TOLD_S: Final = 5.0  # between two lines about a long run


def run(arguments: argparse.Namespace) -> int:
    service = _service(arguments.service)
    asked = _asked(arguments)
    _say_strange(asked, [klass.name for klass in service.classes], sys.stderr)
    plant = _plant(arguments, service, asked)
    bounds = {Role(name): tier.bounds for name, tier in service.spec.tiers.items()}
    words = arguments.policy or ["plimsoll"]
    slo = None if service.spec.slo is None else service.spec.slo.to_core()
    scene = Scene(bounds, plant, slo, plant.gpus, asked, arguments.gateways)
    setting = Setting(
        _initial(arguments.initial, bounds),
        asked[-1].at_s,
        arguments.gateways,
        arguments.seed,
        clients=Manner(arguments.clients),
        max_gpus=arguments.max_gpus,
    )
    ground = Ground(scene, setting.initial, setting.end_s)
    for text in words:
        own = _understood(text, ground)
        _placed(text, own, plant.gpus, setting.max_gpus)
        if arguments.initial is not None and own != setting.initial:
            print(f"--initial is not for --policy {text}, whose replicas are its own", file=sys.stderr)
    outs = _outs(arguments, words, plant)

    made: dict[str, Run] = {}
    progress = _Progress(sys.stderr)

    def one(text: str, files: _Files = _NOWHERE) -> Run:
        policy = registry.parse(text, scene)
        own = setting if policy.initial is None else replace(setting, initial=policy.initial)
        coming = progress.of(asked, text, policy)
        made[text] = _one(service, plant, text, policy, own, coming, files, arguments.output == "html")
        return made[text]

    play = frontier.playing(lambda text, seed: one(text).summary)
    with contextlib.ExitStack() as open_files:
        files = _Files(*(None if path is None else open_files.enter_context(opened(path)) for path in outs))
        chosen = [each for text in words for each in frontier.words(text, ground, play, (setting.seed,))]
        for file in files:
            if file is not None:
                empty(file)
        runs = [made[text] if text in made and files == _NOWHERE else one(text, files) for text in chosen]
    say(_told(runs, slo, arguments))
    return 0


def _told(runs: Sequence[Run], slo: Slo | None, arguments: argparse.Namespace) -> str:
    """What is printed of runs."""
    found = [run.summary for run in runs]
    if arguments.output == "json":
        return json.dumps(found if len(found) > 1 else found[0], indent=2) + "\n"
    if arguments.output == "html":
        title = f"{Path(arguments.trace).name} against {Path(arguments.service).name} on {arguments.hardware}"
        return simulated.report(runs, slo, title)
    return "\n".join([*simulated.shown(found, Screen.of(sys.stdout)), ""])


def _initial(text: str | None, bounds: Bounds) -> Mapping[Role, int]:
    """Replicas that are ready at the start: each tier's least where nothing is said. Raises BadInput."""
    if text is None:
        return {role: least for role, (least, _) in bounds.items()}
    found = replicas(text.split(","), bounds, "--initial")
    for role, count in found.items():
        if count > (most := bounds[role][1]):
            raise BadInput(f"--initial: {count} {role} replicas are more than the manifest's maxReplicas, {most}")
    return found


class _Understood(Exception):
    """A comparison has come to its first runs."""


def _understood(text: str, ground: Ground) -> Mapping[Role, int]:
    """The replicas that a policy begins with. Raises BadInput where its word is none.

    A comparison is asked which runs it would begin with were there but one request, which takes no time.
    """
    if not frontier.compares(text):
        return registry.parse(text, ground.scene).initial or ground.initial
    asked = [replace(one, at_s=0.0) for one in (ground.scene.asked or ())[:1]]
    brief = Ground(replace(ground.scene, asked=asked), ground.initial, 0.0)

    def play(runs: Sequence[tuple[str, int]]) -> Sequence[frontier.Summary]:
        for word, _ in runs:
            registry.parse(word, brief.scene)
        raise _Understood

    with contextlib.suppress(_Understood):
        frontier.words(text, brief, play)
    return ground.initial


def _placed(text: str, initial: Mapping[Role, int], gpus: Mapping[Role, int], most: int | None) -> None:
    """Raises BadInput where so many GPUs are too few for the replicas that a policy begins with."""
    if most is None or sum(count * gpus[role] for role, count in initial.items()) <= most:
        return
    parts = (
        f"{n} {role} replicas of {gpus[role]} GPU{'' if gpus[role] == 1 else 's'} each" for role, n in initial.items()
    )
    raise BadInput(f"--max-gpus: {most} are too few for the {' and '.join(parts)} that --policy {text} begins with")


class _Files(NamedTuple):
    """Where rows are written; None for nowhere."""

    requests: TextIO | None = None
    replicas: TextIO | None = None
    windows: TextIO | None = None
    decisions: TextIO | None = None


_NOWHERE: Final = _Files()


def _outs(arguments: argparse.Namespace, words: Sequence[str], plant: Plant) -> Sequence[str | None]:
    """The files of `_Files`. Raises BadInput where they would be of several policies, and Unwritable."""
    outs = [getattr(arguments, f"{name}_out") for name in _Files._fields]
    writes = [(f"--{name}-out", path) for name, path in zip(_Files._fields, outs, strict=True) if path is not None]
    if writes and (len(words) > 1 or frontier.several(words[0])):
        raise BadInput("--requests-out, --replicas-out, --windows-out and --decisions-out are for one policy at a time")
    reads = [("--trace", arguments.trace), ("--service", arguments.service)]
    if arguments.hardware.endswith(".json"):  # no built-in name
        reads.append(("--hardware", arguments.hardware))
    if plant.start.listed_s:
        reads.append(("--start-up", arguments.start_up))
    if arguments.model_config is not None:
        reads.append(("--model-config", arguments.model_config))
    apart(reads, writes)
    return outs


def _one(
    service: InferenceService,
    plant: Plant,
    text: str,
    policy: Policy,
    setting: Setting,
    asked: Iterable[Asked],
    files: _Files,
    drawn: bool,
) -> Run:
    slo = None if service.spec.slo is None else service.spec.slo.to_core()
    began = time.perf_counter()
    timeline = Timeline(setting.end_s)
    result = Result(plant, setting.initial, slo, files.requests, files.windows, service.classes)

    def take(visit: Visit) -> None:
        result.take(visit)
        timeline.take(visit, result.met(visit))

    world = World(service, plant, policy, setting, take if drawn else result.take)
    world.run(asked)
    if files.replicas is not None:
        files.replicas.writelines(json.dumps(row) + "\n" for row in replica_rows(world))
    if files.decisions is not None:
        files.decisions.writelines(json.dumps(row) + "\n" for row in decision_rows(world))
    summary = result.summary(world, text, setting.seed, setting.end_s, time.perf_counter() - began)
    counts = {role: [one for one in world.log.replicas if one[1] is role] for role in world.tiers}
    return Run(
        summary,
        list(timeline.moments()),
        {
            role: [(at_s, wanted, ready) for at_s, _, wanted, ready, *_ in those if at_s <= setting.end_s]
            for role, those in counts.items()
        },
    )


class _Progress:
    """A line now and then about how far a run is, or the many of a search, for whoever waits."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._runs, self._told_s = stream, 0, time.monotonic()

    def of(self, asked: Sequence[Asked], text: str, policy: Policy) -> Iterator[Asked]:
        """The requests of a run, as they are taken. The policy, made for this run, is overheard: it is asked at each
        tick, and there may be hours without a request."""
        self._runs += 1
        run, taken, length_s = f"run {self._runs}, {text}", 0, max(asked[-1].at_s, 1e-9)
        wanted = policy.wanted

        def tell(now_s: float) -> None:
            if time.monotonic() - self._told_s > _TOLD_S:
                self._told_s = time.monotonic()
                done = f"{taken:,} of {len(asked):,} requests, {min(1.0, now_s / length_s):.0%} of the time"
                print(f"{run}: {done}", file=self._stream, flush=True)

        def overheard(look: Look) -> Mapping[Role, int]:
            tell(look.now_s)
            return wanted(look)

        def coming() -> Iterator[Asked]:
            nonlocal taken
            for one in asked:
                tell(one.at_s)
                yield one
                taken += 1

        policy.wanted = overheard  # type: ignore[method-assign]
        return coming()


def _service(path: str) -> InferenceService:
    """The one service of a manifest. Raises InvalidSpec and BadInput."""
    kinds = [one for one in documents(path) if isinstance(one, dict) and one.get("kind") == labels.KIND]
    found = _asked_first(kinds)
    if len(found) != 1:
        raise BadInput(f"{path}: must hold one {labels.KIND}, not {len(found)}")
    metadata = found[0].get("metadata")
    if not isinstance(metadata, dict):
        raise BadInput(f"{path}: metadata: must hold the service's name")
    service = parse({**found[0], "metadata": {"namespace": "default", **metadata}})
    if service.fallback is not None:
        to = service.fallback[1]
        print(f"what goes to {to} counts as downgraded, and as missed: a fallback is not simulated", file=sys.stderr)
    return service


def _asked_first(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those services of a manifest that are no fallback of another one in it."""

    def at(one: object, *keys: str) -> object:
        for key in keys:
            one = one.get(key) if isinstance(one, dict) else None
        return one

    taken = [name for one in found if (name := at(one, "spec", "admission", "fallback", "name")) is not None]
    return [one for one in found if at(one, "metadata", "name") not in taken] if len(found) > 1 else list(found)


def _asked(arguments: argparse.Namespace) -> list[Asked]:
    for name, value in (("--from", arguments.from_s), ("--seed", arguments.seed)):
        if value < 0:
            raise BadInput(f"{name}: {value:g} is below 0")
    if not 0.0 < arguments.rate_scale < 1000.0:
        raise BadInput(f"--rate-scale: {arguments.rate_scale:g} is not above 0 and below 1000")
    read = trace.read(Path(arguments.trace))
    scaled = trace.scaled(read, arguments.rate_scale, Random(arguments.seed))
    if not scaled:
        raise BadInput(f"--rate-scale: {arguments.rate_scale:g} leaves none of the {len(read):,} requests of the trace")
    asked = trace.between(scaled, arguments.from_s, arguments.to_s)
    if not asked:
        raise BadInput(f"--from {arguments.from_s:g} --to {arguments.to_s:g}: no request of the trace lies between")
    return asked


def _say_strange(asked: Sequence[Asked], known: Collection[str], stream: TextIO) -> None:
    """Names the priorities of a trace that are no class of the service: as at the gateway, these are the default's."""
    strange = Counter(one.klass for one in asked if one.klass and one.klass not in known)
    for name, count in sorted(strange.items())[:_STRANGE]:
        print(f"priority {name!r} of {count:,} requests names no class of the service: default", file=stream)


def _plant(arguments: argparse.Namespace, service: InferenceService, asked: Sequence[Asked]) -> Plant:
    own, tiers = profile.load(arguments.hardware), dict(service.spec.tiers.items())
    limits = {} if "serve" in tiers else {"block_size": _DISAGGREGATED_BLOCK}
    limits |= _limits(service.spec.engine.args)
    own = replace(own, **cast(Any, limits))
    if own.max_num_seqs > own.budget or own.block_size > own.kv_tokens:
        raise BadInput(
            "the engine's arguments leave a step without a token for each sequence, or a cache without a block"
        )
    for name, value, least in (("--plant-scale", arguments.plant_scale, 1e-6), ("--noise", arguments.noise, 0.0)):
        if not least <= value < 1000.0:
            raise BadInput(f"{name}: {value:g} is out of range")
    if not 0.0 <= arguments.spread < 1.0:
        raise BadInput(f"--spread: {arguments.spread:g} is not from 0 to below 1")
    for name, count in (("--gateways", arguments.gateways), ("--max-gpus", arguments.max_gpus)):
        if count is not None and count < 1:
            raise BadInput(f"{name}: at least 1")
    if arguments.gateways > _MOST_GATEWAYS:
        raise BadInput(f"--gateways: at most {_MOST_GATEWAYS:,}")
    return Plant(
        own,
        startup.parse(arguments.start_up),
        scale=arguments.plant_scale,
        spread=arguments.spread,
        noise=arguments.noise,
        chunk=_CHUNK if any(one.ids for one in asked) else 0,
        config=_config(arguments.model_config),
        gpus={Role(name): tier.gpus for name, tier in tiers.items()},
    )


def _limits(args: Sequence[object]) -> dict[str, int]:
    """Limits that the user's engine arguments set."""
    stated = engine_arguments.stated(args)
    found: dict[str, int] = {}
    for flag, limit in _FLAGS.items():
        if (value := stated.get(flag, "auto")) in _AUTO:
            continue
        count = engine_arguments.count(value)
        if not count or count > _MOST_TOKENS:
            raise BadInput(f"spec.engine.args: {flag} {value} is no count of 1 or more")
        found[limit] = count
    return found


def _config(path: str | None) -> Mapping[str, Any] | None:
    if path is None:
        return None
    read = profile.document(path)
    if not isinstance(read, dict):
        raise BadInput(f"{path}: is no JSON object")
    return read
