"""`plimsoll simulate`: a trace against a service, on a fleet in virtual time, with Plimsoll's own decisions or others'.

Nothing is asked of a cluster. The manifest is the cluster's; what an engine can do comes from a hardware profile, and
the manifest's engine arguments that change its limits hold here too.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
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
from plimsoll.cli.manifests import documents
from plimsoll.cli.output import Screen
from plimsoll.cli.simulated import Run
from plimsoll.core.picking.endpoint import Role
from plimsoll.sim import frontier, profile, startup, trace
from plimsoll.sim.clients import Manner
from plimsoll.sim.errors import BadInput
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import Policy, Scene
from plimsoll.sim.policies.options import replicas, whole
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
_MOST_TOKENS: Final = 10**12  # of an engine's limits
_MOST_GATEWAYS: Final = 1000
_TOLD_S: Final = 5.0  # between two lines about a long run


def run(arguments: argparse.Namespace) -> int:
    service = _service(arguments.service)
    asked = _asked(arguments)
    _say_strange(asked, [klass.name for klass in service.classes], sys.stderr)
    plant = _plant(arguments, service, asked)
    bounds = {Role(name): tier.bounds for name, tier in service.spec.tiers.items()}
    initial: Mapping[Role, int] = {role: least for role, (least, _) in bounds.items()}
    if arguments.initial is not None:
        initial = replicas(arguments.initial.split(","), bounds, "--initial")
    words = arguments.policy or ["plimsoll"]
    slo = None if service.spec.slo is None else service.spec.slo.to_core()
    scene = Scene(bounds, plant, slo, plant.gpus, asked, arguments.gateways)
    for text in words:
        if not frontier.compares(text):
            registry.parse(text, scene)
    outs = _outs(arguments, words)
    setting = Setting(
        initial,
        asked[-1].at_s,
        arguments.gateways,
        arguments.seed,
        clients=Manner(arguments.clients),
        max_gpus=arguments.max_gpus,
    )

    made: dict[str, Run] = {}
    progress = _Progress(sys.stderr)

    def one(text: str, files: _Files = _NOWHERE) -> Run:
        policy = registry.parse(text, scene)
        own = setting if policy.initial is None else replace(setting, initial=policy.initial)
        coming = progress.of(asked, text)
        made[text] = _one(service, plant, text, policy, own, coming, files, arguments.output == "html")
        return made[text]

    play = frontier.playing(lambda text, seed: one(text).summary)
    ground = Ground(scene, initial, setting.end_s)
    with contextlib.ExitStack() as open_files:
        files = _Files(*(None if path is None else open_files.enter_context(_opened(path)) for path in outs))
        chosen = [each for text in words for each in frontier.words(text, ground, play, (setting.seed,))]
        runs = [made[text] if text in made and files == _NOWHERE else one(text, files) for text in chosen]
    found = [run.summary for run in runs]
    if arguments.output == "json":
        print(json.dumps(found if len(found) > 1 else found[0], indent=2))
    elif arguments.output == "html":
        title = f"{Path(arguments.trace).name} against {Path(arguments.service).name} on {arguments.hardware}"
        print(simulated.report(runs, slo, title), end="")
    else:
        print("\n".join(simulated.shown(found, Screen.of(sys.stdout))))
    return 0


class _Files(NamedTuple):
    """Where rows are written; None for nowhere."""

    requests: TextIO | None = None
    replicas: TextIO | None = None
    windows: TextIO | None = None
    decisions: TextIO | None = None


_NOWHERE: Final = _Files()


def _outs(arguments: argparse.Namespace, words: Sequence[str]) -> Sequence[str | None]:
    """The files of `_Files`. Raises BadInput where they would be of several policies."""
    outs = (arguments.requests_out, arguments.replicas_out, arguments.windows_out, arguments.decisions_out)
    if any(path is not None for path in outs) and (len(words) > 1 or frontier.several(words[0])):
        raise BadInput("--requests-out, --replicas-out, --windows-out and --decisions-out are for one policy at a time")
    taken = {Path(path).resolve(): path for path in (arguments.trace, arguments.service)}
    for path in outs:
        if path is None or (Path(path).exists() and not Path(path).is_file()):  # such as /dev/null
            continue
        if (where := Path(path).resolve()) in taken:
            raise BadInput(f"{path}: is read or written already, so that rows need a file of their own")
        taken[where] = path
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

    def of(self, asked: Sequence[Asked], text: str) -> Iterator[Asked]:
        """The requests of a run, as they are taken."""
        self._runs += 1
        length_s = max(asked[-1].at_s, 1e-9)
        for number, one in enumerate(asked):
            if time.monotonic() - self._told_s > _TOLD_S:
                self._told_s = time.monotonic()
                done = f"{number:,} of {len(asked):,} requests, {one.at_s / length_s:.0%} of the time"
                print(f"run {self._runs}, {text}: {done}", file=self._stream, flush=True)
            yield one


def _opened(path: str) -> TextIO:
    """A file to write to."""
    try:
        return Path(path).open("w")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None


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
    words = [word for arg in args for word in str(arg).split("=", 1)]
    pairs = itertools.pairwise(words)
    return {_FLAGS[flag]: count for flag, value in pairs if flag in _FLAGS and (count := whole(value, _MOST_TOKENS))}


def _config(path: str | None) -> Mapping[str, Any] | None:
    if path is None:
        return None
    read = profile.document(path)
    if not isinstance(read, dict):
        raise BadInput(f"{path}: is no JSON object")
    return read
