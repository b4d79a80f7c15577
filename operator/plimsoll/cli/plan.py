"""`plimsoll plan`: what to run for a model, a promise and a workload, before there is a cluster.

Nothing is asked of a cluster, and nothing is measured: a replica is what a measured hardware profile says, or the
roofline of the model's shape on the GPU. The answer is `plimsoll.core.planning`'s; here are only words and files.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from plimsoll.cli import curve, files, plan_shown
from plimsoll.cli.output import Screen
from plimsoll.core import roofline, units
from plimsoll.core.latency import EngineLimits, KvTransfer, StepModel
from plimsoll.core.planning import mix, shapes
from plimsoll.core.planning.machine import BLOCK_TOKENS, BUDGETS, Machine, of_shape
from plimsoll.core.planning.plan import NoPlan, Question, plan
from plimsoll.core.roofline import ACCELERATORS, Accelerator, ModelShape
from plimsoll.core.slo import Slo
from plimsoll.core.workload import Workload, from_samples
from plimsoll.sim import profile, trace
from plimsoll.sim.errors import BadInput
from plimsoll.sim.profile import Coefficients

_GPUS: Final = (1, 2, 4, 8)
_MOST_GPUS: Final = 64  # of an engine, as in the API
_SHORTEST_STEP_S: Final = 1e-6  # less is no step of an engine
_LONGEST_S: Final = 3600.0
_HIGHEST_COST: Final = 1e6
T = TypeVar("T")


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0 with a plan, 1 where no number of replicas keeps the promise."""
    cost = _cost(arguments.gpu_hour_cost)
    read = (("--model", arguments.model), ("--hardware", arguments.hardware), ("--trace", arguments.trace))
    files.apart([one for one in read if one[1]], [("--picture", arguments.picture)] if arguments.picture else [])
    found = plan(_question(arguments, *_machines(arguments)))
    if isinstance(found, NoPlan):
        print("\n".join(plan_shown.refused(found)), file=sys.stderr)
        return 1
    if arguments.picture:
        marks = (
            (found.question.rate_per_s, "asked for"),
            (found.chosen.knee_per_s, "knee"),
            (found.chosen.load_line_per_s, "load line"),
        )
        _write(arguments.picture, curve.draw(_title(arguments, found.chosen.gpus), found.curve, marks))
    if arguments.json:
        files.say(json.dumps(plan_shown.document(found, cost), indent=2) + "\n")
    else:
        files.say("\n".join([*plan_shown.lines(found, cost, Screen.of(sys.stdout)), ""]))
    return 0


def _title(arguments: argparse.Namespace, gpus: int) -> str:
    what = arguments.hardware or f"{arguments.model} on {arguments.gpu}"
    return f"{what}, {gpus} GPUs"


def _question(arguments: argparse.Namespace, machines: list[list[Machine]], max_model_len: float) -> Question:
    workload, rate, gap_cv2 = _workload(arguments)
    if not 0 <= arguments.headroom < 1:
        raise BadInput(f"--headroom: {arguments.headroom:g} is not 0 or more and below 1")
    if not 0 < arguments.fabric_gb_per_s < math.inf:
        raise BadInput(f"--fabric-gb-per-s: {arguments.fabric_gb_per_s:g} is not above 0")
    if not 1 <= arguments.accepted_tokens <= 4:
        raise BadInput(f"--accepted-tokens: {arguments.accepted_tokens:g} is not from 1 to 4")
    return Question(
        workload,
        _slo(arguments),
        rate,
        machines,
        gap_cv2,
        arguments.headroom,
        _seconds("--gap", arguments.gap),
        arguments.fabric_gb_per_s * 1e9,
        arguments.accepted_tokens,
        max_model_len,
    )


def _slo(arguments: argparse.Namespace) -> Slo:
    if not 1 <= arguments.percentile <= 99:
        raise BadInput(f"--percentile: {arguments.percentile} is not from 1 to 99")
    ttft, more = _seconds("--ttft", arguments.ttft), _seconds("--ttft-per-k-token", arguments.ttft_per_k_token)
    tpot = _seconds("--tpot", arguments.tpot)
    e2e = _seconds("--e2e", arguments.e2e)
    if ttft is None and tpot is None and e2e is None:
        raise BadInput("--ttft, --tpot or --e2e is needed: a promise without a target sizes nothing")
    if ttft is None and more:
        raise BadInput("--ttft-per-k-token is added to --ttft, which is missing")
    if ttft is not None and e2e is not None and e2e <= ttft:
        raise BadInput("--e2e: must be longer than --ttft, which is a part of it")
    return Slo(arguments.percentile / 100, ttft, more or 0.0, tpot, e2e, _seconds("--itl", arguments.itl))


def _seconds(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = units.parse_duration(text)
    except ValueError as error:
        raise BadInput(f"{option}: {error}") from None
    if not 0 < seconds <= _LONGEST_S:
        raise BadInput(f"{option}: {text} is not above 0 and at most an hour")
    return seconds


def _workload(arguments: argparse.Namespace) -> tuple[Workload, float, float]:
    """The mix, its rate and the burstiness of its arrivals."""
    means = {"--prompt-tokens": arguments.prompt_tokens, "--output-tokens": arguments.output_tokens}
    sigmas = {"--prompt-sigma": arguments.prompt_sigma, "--output-sigma": arguments.output_sigma}
    if arguments.trace is not None:
        for option, value in {**means, **sigmas}.items():
            if value is not None:
                raise BadInput(f"{option} and --trace: a trace has its own lengths, leave one of the two out")
        return _traced(arguments)
    for option, value in {"--rate": arguments.rate, **means}.items():
        if value is None:
            raise BadInput(f"{option} is needed, or --trace")
    mixed = _named(
        {"prompt_tokens": "--prompt-tokens", "output_tokens": "--output-tokens", "prompt_sigma": "--prompt-sigma",
         "output_sigma": "--output-sigma", "cached_share": "--cached-share"},
        lambda: mix.lognormal(
            arguments.prompt_tokens,
            arguments.output_tokens,
            mix.PROMPT_SIGMA if arguments.prompt_sigma is None else arguments.prompt_sigma,
            mix.OUTPUT_SIGMA if arguments.output_sigma is None else arguments.output_sigma,
            arguments.cached_share,
        ),
    )  # fmt: skip
    return mixed, _rate(arguments.rate), 1.0


def _traced(arguments: argparse.Namespace) -> tuple[Workload, float, float]:
    if not 0 <= arguments.cached_share < 1:
        raise BadInput(f"--cached-share: {arguments.cached_share:g} is not 0 or more and below 1")
    asked = trace.read(Path(arguments.trace))
    try:
        busy = mix.busiest([one.at_s for one in asked])
    except ValueError:
        raise BadInput(f"--trace: {arguments.trace}: has no rate: two requests at different times are needed") from None
    inside = asked[busy.first : busy.until]
    prompts = [float(one.prompt_tokens) for one in inside]
    share = arguments.cached_share
    mixed = from_samples(
        [p * (1 - share) for p in prompts], [p * share for p in prompts], [float(one.output_tokens) for one in inside]
    )
    return mixed, busy.rate_per_s if arguments.rate is None else _rate(arguments.rate), busy.gap_cv2


def _rate(rate: float) -> float:
    if not 0 < rate <= 1e6:
        raise BadInput(f"--rate: {rate:g} is not above 0 and at most a million requests a second")
    return rate


def _machines(arguments: argparse.Namespace) -> tuple[list[list[Machine]], float]:
    """What replicas there may be, and the longest request that they take."""
    only = arguments.gpus_per_replica
    if only is not None and not 1 <= only <= _MOST_GPUS:
        raise BadInput(f"--gpus-per-replica: {only} is not from 1 to {_MOST_GPUS}")
    if arguments.hardware is not None:
        shape_words = ("model", "gpu", "weights", "kv_cache")
        for option in shape_words:
            if getattr(arguments, option) is not None:
                flag = f"--{option.replace('_', '-')}"
                raise BadInput(f"{flag} and --hardware: a measured profile takes the place of model and GPU")
        own = profile.load(arguments.hardware)
        _check_steps(arguments.hardware, own)
        return [measured(own, only or 1)], own.max_model_len
    for option in ("model", "gpu"):
        if getattr(arguments, option) is None:
            raise BadInput(f"--{option} is needed, or --hardware in the place of both")
    return _shaped(_shape(arguments), _gpu(arguments.gpu), only, arguments.model), math.inf


def _check_steps(name: str, own: profile.Profile) -> None:
    for steps in (own.coefficients, own.hot or own.coefficients):
        if not _SHORTEST_STEP_S <= steps.base <= _LONGEST_S:
            raise BadInput(f"--hardware: {name}: a base of {steps.base:g} s is no step: give 1e-6 to 3600")
        for key in ("anypre", "pretok", "preattn", "dec", "ctx"):
            if getattr(steps, key) > _LONGEST_S:
                raise BadInput(f"--hardware: {name}: {key} of {getattr(steps, key):g} s is above {_LONGEST_S:g}")


def _gpu(name: str) -> Accelerator:
    known = {one.lower(): gpu for one, gpu in ACCELERATORS.items()}
    if name.lower() not in known:
        raise BadInput(f"--gpu: no figures of {name!r}: known are {', '.join(ACCELERATORS)}")
    return known[name.lower()]


def _shape(arguments: argparse.Namespace) -> ModelShape:
    kv_bytes = 1.0 if arguments.kv_cache == "fp8" else 2.0
    name = arguments.model
    if not name.endswith(".json"):
        return _named({}, lambda: shapes.find(name, arguments.weights, kv_bytes), "--model")
    try:
        read = profile.document(name)
    except BadInput as error:
        raise BadInput(f"--model: {error}") from None
    if not isinstance(read, dict):
        raise BadInput(f"--model: {name}: is no JSON object")
    if arguments.weights is not None and read.get("quantization_config") is not None:
        raise BadInput(f"--weights: {name} has its own in quantization_config, leave --weights out")
    return _named(
        {}, lambda: shapes.with_weights(roofline.model_shape(read, kv_bytes), arguments.weights), f"--model: {name}"
    )


def _shaped(shape: ModelShape, gpu: Accelerator, only: int | None, name: str) -> list[list[Machine]]:
    """By the roofline, on each number of GPUs that the model can be shared out to, at each chunk budget."""
    if only is not None and shape.heads % only:
        raise BadInput(f"--gpus-per-replica: {only} does not divide the {shape.heads} attention heads of {name}")
    found = []
    for gpus in (only,) if only else (one for one in _GPUS if shape.heads % one == 0):
        machines = [one for budget in BUDGETS if (one := of_shape(shape, gpu, gpus, budget)) is not None]
        if machines:
            found.append(machines)
    if not found:
        need = shape.memory_bytes / 2**30
        where = f"{only} x {gpu.name}" if only else f"{max(_GPUS)} x {gpu.name}"
        raise BadInput(f"--gpu: the weights of {name}, {need:,.0f} GiB, leave no cache on {where}")
    return found


def measured(own: profile.Profile, gpus: int) -> list[Machine]:
    """A measured profile as a machine at each chunk budget. What prefills is planned hot, what only decodes cool."""
    hot = own.hot or own.coefficients
    machine = Machine(
        _steps(hot),
        _steps(own.coefficients),
        EngineLimits(own.max_num_seqs, own.kv_tokens, own.budget),
        KvTransfer(own.layers, BLOCK_TOKENS, step_factor=own.consumer_factor),
        float(own.kv_bytes_per_token),
        gpus,
        prefill_factor=own.producer_factor,
        hinge_sequences=own.hinge_sequences,
        hinge_s=own.hinge_dec,
        cool_share=own.cool_share,
        hot_share=own.hot_share,
        mixture=own.mixture,
        measured=True,
    )
    budgets = sorted({own.budget, *(one for one in BUDGETS if one >= own.max_num_seqs)})
    return [machine.budgeted(one) for one in budgets]


def _steps(c: Coefficients) -> StepModel:
    return StepModel(c.base, c.anypre, c.pretok, c.preattn, c.dec, c.ctx)


def _named(options: dict[str, str], make: Callable[[], T], always: str = "") -> T:
    """What `make` makes; the core's complaint about an argument becomes one about its option."""
    try:
        return make()
    except ValueError as error:
        name = str(error).split(" ", 1)[0]
        if name in options:
            raise BadInput(f"{options[name]}: {str(error).removeprefix(name).strip()}") from None
        raise BadInput(f"{always}: {error}") from None


def _cost(value: float | None) -> float | None:
    if value is not None and not 0 < value <= _HIGHEST_COST:
        raise BadInput(f"--gpu-hour-cost: {value:g} is not above 0 and at most a million")
    return value


def _write(path: str, text: str) -> None:
    with files.opened(path) as file:
        files.empty(file)
        file.write(text)
