"""`plimsoll plan`: plans the GPUs for a model, an SLO and a workload, without a cluster.

A measured hardware profile, or the roofline of the model on the GPU, models a replica. `plimsoll.core.planning`
computes the plan; this module handles options and files.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from plimsoll.cli import goodput_chart, output_files, plan_manifest, plan_output
from plimsoll.cli.output import Screen
from plimsoll.core import units
from plimsoll.core.engine_model import roofline
from plimsoll.core.engine_model.roofline import ACCELERATORS, Accelerator, LoraSlots, ModelShape
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel
from plimsoll.core.planning import known_models, workloads
from plimsoll.core.planning.fleet_plan import FleetPlan, PlanFailure, PlanRequest, make_plan
from plimsoll.core.planning.machine_model import TOKEN_BUDGETS, Machine, machine_from_roofline
from plimsoll.core.slo import Slo
from plimsoll.core.types import Unavailable
from plimsoll.core.units import format_number
from plimsoll.core.workload import Workload, from_samples
from plimsoll.engines import vllm
from plimsoll.sim import profile, trace
from plimsoll.sim.errors import BadInput
from plimsoll.sim.plan_simulation import PlanSimulation, simulate_plan
from plimsoll.sim.profile import HardwareProfile, StepCoefficients

_GPU_COUNTS: Final = (1, 2, 4, 8)
_MAX_GPUS: Final = 64  # per engine, as in the API
_MIN_STEP_S: Final = 1e-6  # shorter engine steps are implausible
_MAX_SECONDS: Final = 3600.0
_MAX_GPU_HOUR_COST: Final = 1e6
T = TypeVar("T")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan. Returns exit status 0, or 1 if no number of replicas meets the SLO."""
    cost = _check_cost(arguments.gpu_hour_cost)
    input_files = (("--model", arguments.model), ("--hardware", arguments.hardware), ("--trace", arguments.trace))
    output_files.ensure_distinct(
        [one for one in input_files if one[1]], [("--picture", arguments.picture)] if arguments.picture else []
    )
    result, simulation = plan_for(arguments)
    if isinstance(result, PlanFailure):
        print("\n".join(plan_output.infeasible_lines(result)), file=sys.stderr)
        return 1
    if arguments.picture:
        marks = (
            (result.request.rate_per_s, "requested rate"),
            (result.chosen.goodput_knee_per_s, "goodput knee"),
            (result.chosen.slo_capacity_per_s, "SLO capacity"),
        )
        _write_file(
            arguments.picture,
            goodput_chart.draw_goodput(_title(arguments, result.chosen.gpus), result.goodput_curve, marks),
        )
    engine = plan_manifest.engine_manifest(result, arguments)
    if arguments.json:
        document = {
            **plan_output.plan_document(result, cost),
            "simulated": plan_output.simulation_document(result, simulation),
            "manifest": {} if engine is None else {"engine": engine},
        }
        output_files.print_text(json.dumps(document, indent=2) + "\n")
    else:
        lines = plan_output.plan_lines(result, simulation, cost, Screen.for_stream(sys.stdout))
        output_files.print_text("\n".join([*lines, *plan_manifest.manifest_lines(engine), ""]))
    return 1 if misses_slo(result, simulation) else 0


def plan_for(
    arguments: argparse.Namespace,
) -> tuple[FleetPlan | PlanFailure, PlanSimulation | Unavailable]:
    """Return the plan for the options of `add_plan_options`, and its simulation if there is one. Raises BadInput."""
    measured = _measured_profile(arguments)
    result = make_plan(_make_question(arguments, *_replica_options(arguments, measured)))
    unavailable = _not_simulated(arguments)
    if isinstance(result, PlanFailure):
        return result, Unavailable("no plan")
    return (result, unavailable) if unavailable is not None else simulate_plan(result, measured, report=_report)


def misses_slo(result: FleetPlan, simulation: PlanSimulation | Unavailable) -> bool:
    """Whether the simulated fleet misses the SLO."""
    return isinstance(simulation, PlanSimulation) and simulation.within_slo < result.request.slo.share


def _report(line: str) -> None:
    """Show progress to a person: a simulation takes up to a minute."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def _measured_profile(arguments: argparse.Namespace) -> HardwareProfile | None:
    """Return the profile that replaces model and GPU, None without."""
    if arguments.hardware is None:
        return None
    for option in ("model", "gpu", "weights", "kv_cache", "max_loras"):
        if getattr(arguments, option) is not None:
            flag = f"--{option.replace('_', '-')}"
            raise BadInput(f"{flag} and --hardware are mutually exclusive: a profile replaces model and GPU")
    hardware_profile = profile.load(arguments.hardware)
    _check_steps(arguments.hardware, hardware_profile)
    return hardware_profile


def _not_simulated(arguments: argparse.Namespace) -> Unavailable | None:
    """Return why the plan is not simulated, None if it is."""
    if arguments.no_simulation:
        return Unavailable("--no-simulation")
    if arguments.cached_share:
        return Unavailable("it would need the prompts that --cached-share says are cached")
    return None


def _title(arguments: argparse.Namespace, gpus: int) -> str:
    subject = arguments.hardware or f"{arguments.model} on {arguments.gpu}"
    return f"{subject}, {gpus} GPUs"


def _make_question(arguments: argparse.Namespace, machines: list[list[Machine]], max_model_len: float) -> PlanRequest:
    workload, rate, gap_cv2 = _workload(arguments)
    if not 0 <= arguments.headroom < 1:
        raise BadInput(f"--headroom: {format_number(arguments.headroom)} must be at least 0 and below 1")
    if not 0 < arguments.fabric_gb_per_s < math.inf:
        raise BadInput(f"--fabric-gb-per-s: {format_number(arguments.fabric_gb_per_s)} must be above 0")
    if not 1 <= arguments.accepted_tokens <= 4:
        raise BadInput(f"--accepted-tokens: {format_number(arguments.accepted_tokens)} must be from 1 to 4")
    return PlanRequest(
        workload,
        _slo(arguments),
        rate,
        machines,
        gap_cv2,
        arguments.headroom,
        _parse_seconds("--itl-limit", arguments.itl_limit),
        arguments.fabric_gb_per_s * 1e9,
        arguments.accepted_tokens,
        max_model_len,
    )


def _slo(arguments: argparse.Namespace) -> Slo:
    if not 1 <= arguments.percentile <= 99:
        raise BadInput(f"--percentile: {arguments.percentile} must be from 1 to 99")
    ttft, ttft_per_1k = (
        _parse_seconds("--ttft", arguments.ttft),
        _parse_seconds("--ttft-per-k-token", arguments.ttft_per_k_token),
    )
    tpot = _parse_seconds("--tpot", arguments.tpot)
    e2e = _parse_seconds("--e2e", arguments.e2e)
    if ttft is None and tpot is None and e2e is None:
        raise BadInput("--ttft, --tpot or --e2e is required: an SLO needs a target")
    if ttft is None and ttft_per_1k:
        raise BadInput("--ttft-per-k-token needs --ttft, to which it is added")
    if ttft is not None and e2e is not None and e2e <= ttft:
        raise BadInput("--e2e: must be longer than --ttft, because it includes it")
    return Slo(arguments.percentile / 100, ttft, ttft_per_1k or 0.0, tpot, e2e, _parse_seconds("--itl", arguments.itl))


def _parse_seconds(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        seconds = units.parse_duration(text)
    except ValueError as error:
        raise BadInput(f"{option}: {error}") from None
    if not 0 < seconds <= _MAX_SECONDS:
        raise BadInput(f"{option}: {text} must be above 0 and at most 1 hour")
    return seconds


def _workload(arguments: argparse.Namespace) -> tuple[Workload, float, float]:
    """Return the request mix, its rate in requests/s, and the squared CV of the interarrival times."""
    means = {"--prompt-tokens": arguments.prompt_tokens, "--output-tokens": arguments.output_tokens}
    sigmas = {"--prompt-sigma": arguments.prompt_sigma, "--output-sigma": arguments.output_sigma}
    if arguments.trace is not None:
        for option, value in {**means, **sigmas}.items():
            if value is not None:
                raise BadInput(f"{option} and --trace are mutually exclusive: a trace has its own lengths")
        return _workload_from_trace(arguments)
    for option, value in {"--rate": arguments.rate, **means}.items():
        if value is None:
            raise BadInput(f"{option} is required, or --trace")
    workload = _with_option_errors(
        {"prompt_tokens": "--prompt-tokens", "output_tokens": "--output-tokens", "prompt_sigma": "--prompt-sigma",
         "output_sigma": "--output-sigma", "cached_share": "--cached-share"},
        lambda: workloads.lognormal_workload(
            arguments.prompt_tokens,
            arguments.output_tokens,
            workloads.PROMPT_SIGMA if arguments.prompt_sigma is None else arguments.prompt_sigma,
            workloads.OUTPUT_SIGMA if arguments.output_sigma is None else arguments.output_sigma,
            arguments.cached_share,
        ),
    )  # fmt: skip
    return workload, _check_rate(arguments.rate), 1.0


def _workload_from_trace(arguments: argparse.Namespace) -> tuple[Workload, float, float]:
    if not 0 <= arguments.cached_share < 1:
        raise BadInput(f"--cached-share: {format_number(arguments.cached_share)} must be at least 0 and below 1")
    requests = trace.read(Path(arguments.trace))
    try:
        busiest_window = workloads.busiest_window([one.at_s for one in requests])
    except ValueError:
        raise BadInput(f"--trace: {arguments.trace}: has no rate: it needs two requests at different times") from None
    window_requests = requests[busiest_window.first : busiest_window.end]
    prompts = [float(one.prompt_tokens) for one in window_requests]
    share = arguments.cached_share
    workload = from_samples(
        [p * (1 - share) for p in prompts],
        [p * share for p in prompts],
        [float(one.output_tokens) for one in window_requests],
    )
    return (
        workload,
        busiest_window.rate_per_s if arguments.rate is None else _check_rate(arguments.rate),
        busiest_window.arrival_cv2,
    )


def _check_rate(rate: float) -> float:
    if not 0 < rate <= 1e6:
        raise BadInput(f"--rate: {format_number(rate)} must be above 0 and at most a million requests/s")
    return rate


def _replica_options(
    arguments: argparse.Namespace, measured: HardwareProfile | None
) -> tuple[list[list[Machine]], float]:
    """Return the replica options, and the longest request that they accept, in tokens."""
    gpus_per_replica = arguments.gpus_per_replica
    if gpus_per_replica is not None and not 1 <= gpus_per_replica <= _MAX_GPUS:
        raise BadInput(f"--gpus-per-replica: {gpus_per_replica} must be from 1 to {_MAX_GPUS}")
    if measured is not None:
        return [profile_machines(measured, gpus_per_replica or 1)], measured.max_model_len
    for option in ("model", "gpu"):
        if getattr(arguments, option) is None:
            raise BadInput(f"--{option} is required, or --hardware instead of --model and --gpu")
    gpu = _accelerator(arguments.gpu)
    arguments.gpu = gpu.name
    lora = plan_manifest.lora_slots(arguments)
    return _roofline_machines(_shape(arguments), gpu, gpus_per_replica, arguments.model, lora), math.inf


def _check_steps(name: str, hardware_profile: profile.HardwareProfile) -> None:
    for steps in (hardware_profile.coefficients, hardware_profile.hot or hardware_profile.coefficients):
        if not _MIN_STEP_S <= steps.base <= _MAX_SECONDS:
            raise BadInput(f"--hardware: {name}: base is {format_number(steps.base)} s, must be from 1e-6 to 3600")
        for key in ("anypre", "pretok", "preattn", "dec", "ctx"):
            if getattr(steps, key) > _MAX_SECONDS:
                raise BadInput(
                    f"--hardware: {name}: {key} is {format_number(getattr(steps, key))} s, "
                    f"must be at most {format_number(_MAX_SECONDS)}"
                )


def _accelerator(name: str) -> Accelerator:
    """The GPU of that name, in any case, or the only one whose name begins so: H100 is H100-SXM."""
    found = [gpu for known, gpu in ACCELERATORS.items() if known.lower() == name.lower()]
    found = found or [gpu for known, gpu in ACCELERATORS.items() if known.lower().startswith(f"{name.lower()}-")]
    if not found:
        raise BadInput(f"--gpu: unknown GPU {name!r}; known are {', '.join(ACCELERATORS)}")
    if len(found) > 1:
        raise BadInput(f"--gpu: {name} may be {' or '.join(gpu.name for gpu in found)}; give the whole name")
    return found[0]


def _shape(arguments: argparse.Namespace) -> ModelShape:
    kv_bytes = 1.0 if arguments.kv_cache == "fp8" else 2.0
    name = arguments.model
    if not name.endswith(".json"):
        return _with_option_errors({}, lambda: known_models.find_shape(name, arguments.weights, kv_bytes), "--model")
    try:
        config = profile.document(name)
    except BadInput as error:
        raise BadInput(f"--model: {error}") from None
    if not isinstance(config, dict):
        raise BadInput(f"--model: {name}: is not a JSON object")
    if arguments.weights is not None and config.get("quantization_config") is not None:
        raise BadInput(f"--weights: {name} sets quantization_config; omit --weights")
    return _with_option_errors(
        {},
        lambda: known_models.with_weights(roofline.model_shape(config, kv_bytes), arguments.weights),
        f"--model: {name}",
    )


def _roofline_machines(
    shape: ModelShape, gpu: Accelerator, gpus_per_replica: int | None, name: str, lora: LoraSlots | None
) -> list[list[Machine]]:
    """Return roofline machines for each tensor-parallel size that the model allows, at each token budget."""
    if gpus_per_replica is not None and shape.heads % gpus_per_replica:
        raise BadInput(
            f"--gpus-per-replica: {gpus_per_replica} does not divide the {shape.heads} attention heads of {name}"
        )
    if lora is not None and shape.experts > 1:
        raise BadInput(f"--max-loras: the memory of adapters of {name}, a mixture of experts, is not known; omit it")
    options = []
    for gpus in (gpus_per_replica,) if gpus_per_replica else (one for one in _GPU_COUNTS if shape.heads % one == 0):
        found = [machine_from_roofline(shape, gpu, gpus, budget, lora) for budget in TOKEN_BUDGETS]
        machines = [one for one in found if one is not None]
        if machines:
            options.append(machines)
    if not options:
        weights_gib = shape.memory_bytes / 2**30
        placement = f"{gpus_per_replica} x {gpu.name}" if gpus_per_replica else f"{max(_GPU_COUNTS)} x {gpu.name}"
        adapters = "" if lora is None else f", with {lora.loras} adapters of rank {lora.rank},"
        raise BadInput(
            f"--gpu: the weights of {name}, {weights_gib:,.0f} GiB{adapters or ','} leave no memory for the KV cache "
            f"on {placement}"
        )
    return options


def profile_machines(hardware_profile: profile.HardwareProfile, gpus: int) -> list[Machine]:
    """Return a measured profile as a machine at each token budget.

    Engines that prefill use the coefficients of a hot GPU, decode engines those of a cool one.
    """
    hot = hardware_profile.hot or hardware_profile.coefficients
    machine = Machine(
        _step_model(hot),
        _step_model(hardware_profile.coefficients),
        EngineLimits(hardware_profile.max_num_seqs, hardware_profile.kv_tokens, hardware_profile.budget),
        KvTransfer(
            hardware_profile.layers, vllm.DISAGGREGATED_BLOCK_TOKENS, step_factor=hardware_profile.consumer_factor
        ),
        float(hardware_profile.kv_bytes_per_token),
        gpus,
        prefill_factor=hardware_profile.producer_factor,
        hinge_sequences=hardware_profile.hinge_sequences,
        hinge_s=hardware_profile.hinge_dec,
        cool_share=hardware_profile.cool_share,
        hot_share=hardware_profile.hot_share,
        mixture_of_experts=hardware_profile.mixture,
        from_profile=True,
    )
    budgets = sorted({hardware_profile.budget, *(one for one in TOKEN_BUDGETS if one >= hardware_profile.max_num_seqs)})
    return [machine.with_token_budget(one) for one in budgets]


def _step_model(c: StepCoefficients) -> StepModel:
    return StepModel(c.base, c.anypre, c.pretok, c.preattn, c.dec, c.ctx)


def _with_option_errors(options: dict[str, str], make: Callable[[], T], context: str = "") -> T:
    """Return `make()`. Raises BadInput that names the option of an argument that the core rejects."""
    try:
        return make()
    except ValueError as error:
        name = str(error).split(" ", 1)[0]
        if name in options:
            raise BadInput(f"{options[name]}: {str(error).removeprefix(name).strip()}") from None
        raise BadInput(f"{context}: {error}") from None


def _check_cost(value: float | None) -> float | None:
    if value is not None and not 0 < value <= _MAX_GPU_HOUR_COST:
        raise BadInput(f"--gpu-hour-cost: {format_number(value)} must be above 0 and at most a million")
    return value


def _write_file(path: str, text: str) -> None:
    with output_files.open_for_writing(path) as file:
        output_files.truncate(file)
        file.write(text)
