"""Parallel sizes of arguments against the GPUs of a tier."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.api.v1alpha1 import UNKNOWN_GPU_RESOURCE, parse
from plimsoll.core.errors import InvalidSpec
from plimsoll.engines import parallelism
from tests import builders


@pytest.mark.parametrize(
    ("gpus", "args", "said"),
    [
        (8, ["--data-parallel-size", "3"], "gpus is 8, which --data-parallel-size 3 does not divide"),
        (
            8,
            ["--data_parallel_size=8", "--tensor-parallel-size", "2"],
            "gpus is 8, and --tensor-parallel-size 2 x --data-parallel-size 8 needs 16",
        ),
        (
            8,
            ["-tp=8", "-pcp", "2", "--enable-expert-parallel"],
            "gpus is 8, and --tensor-parallel-size 8 x --prefill-context-parallel-size 2 needs 16",
        ),
        (
            8,
            ["--tensor-parallel-size", "8", "--pipeline-parallel-size=1", "--pipeline-parallel-size=2"],
            "gpus is 8, and --tensor-parallel-size 8 x --pipeline-parallel-size 2 needs 16",
        ),
        (2, ["-tp", "4"], "gpus is 2, and --tensor-parallel-size 4 needs 4"),
    ],
)
def test_parse_sizes_beyond_gpus_name_both(gpus: int, args: list[str], said: str) -> None:
    spec = builders.service(tiers={"serve": {"gpus": gpus}}, engine={"args": args})
    with pytest.raises(InvalidSpec) as error:
        parse(spec)
    (problem,) = error.value.problems
    assert problem.startswith("spec.engine.args: parallel sizes must fit the gpus of each tier")
    assert problem.endswith(f": tiers.serve.{said}")


@pytest.mark.parametrize(
    "args",
    [
        ["--config=/etc/vllm.yaml", "-tp", "16"],
        ["-n", "2", "-tp", "16"],
        ["--distributed-executor-backend", "ray", "-tp", "16"],
        ["--data-parallel-size-local", "1", "-dp", "16"],
        ["-dpl=1", "-dp", "16"],
    ],
)
def test_misfit_of_engine_placed_by_user_is_unknown(args: list[str]) -> None:
    assert parallelism.misfit(8, args) is None
    assert parallelism.waste(8, args) is None


def test_misfit_without_gpus_is_unknown() -> None:
    assert parallelism.misfit(0, ["-tp", "2"]) is None  # ranks on CPUs


@pytest.mark.parametrize("args", [[], ["-dp", "8", "-ep"], ["-tp", "2", "-pp", "4"], ["-tp", "x"]])
def test_waste_of_sizes_that_use_all_gpus_is_none(args: list[str]) -> None:
    assert parallelism.waste(8, args) is None


NEURON = "aws.amazon.com/neuron"


def _tier_with(tier: dict[str, Any], args: tuple[str, ...] = ("-tp", "4")) -> dict[str, Any]:
    return builders.service(tiers={"serve": {"gpus": 2, **tier}}, engine={"args": list(args)})


def test_absent_gpu_resource_is_the_installations() -> None:
    """A unit of it may be several devices, so sizes above `gpus` are not judged; the object stays as it is."""
    service = parse(_tier_with({}), NEURON)
    assert service.spec.tiers.serve is not None
    assert service.spec.tiers.serve.gpu_resource is None
    assert service == parse(_tier_with({}), UNKNOWN_GPU_RESOURCE)


def test_named_gpu_resource_is_judged_by_itself() -> None:
    with pytest.raises(InvalidSpec, match="gpus is 2, and --tensor-parallel-size 4 needs 4"):
        parse(_tier_with({"gpuResource": "nvidia.com/gpu"}), NEURON)
    parse(_tier_with({"gpuResource": NEURON}))


def test_installations_resource_may_not_be_in_pod_resources() -> None:
    resources = {"pod": {"resources": {"limits": {NEURON: 1}}}}
    with pytest.raises(InvalidSpec, match=r"set the tier.s gpus instead of GPUs in pod\.resources"):
        parse(_tier_with(resources, ()), NEURON)


def test_refused_sizes_say_how_to_name_another_resource() -> None:
    with pytest.raises(InvalidSpec, match=r"a unit of another resource, set the tier's gpuResource"):
        parse(_tier_with({}))
