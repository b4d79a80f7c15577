"""How many GPUs an engine of vLLM uses by its arguments, and whether a tier has them.

Problem: an engine whose parallel sizes do not fit its GPUs pulls an image, loads for minutes, and fails then.

Idea: the sizes multiply. Data parallel ranks are copies, each of which spans tensor, pipeline and prefill context
ranks. Expert parallelism and decode context parallelism use the GPUs of the others. Without a tensor parallel size,
Plimsoll sets what the other sizes leave. Arguments that spread an engine in other ways (Ray, several nodes, a config
file, ranks that the user places) are not checked. Nor are resources of another kind than whole GPUs: one unit of them
may be several devices, such as the cores of a Neuron device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from plimsoll.engines import vllm
from plimsoll.engines.engine import last_count


class SizeFlag(NamedTuple):
    """A parallel size: its flag and its short name."""

    flag: str
    short: str

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings of the flag."""
        return self.flag, f"--{self.flag[2:].replace('-', '_')}", self.short


TENSOR: Final = SizeFlag(vllm.TENSOR_PARALLEL_SIZE, "-tp")
OTHERS: Final = (
    SizeFlag(vllm.PIPELINE_PARALLEL_SIZE, "-pp"),
    SizeFlag(vllm.DATA_PARALLEL_SIZE, "-dp"),
    SizeFlag(vllm.PREFILL_CONTEXT_PARALLEL_SIZE, "-pcp"),
)
WHOLE_GPUS: Final = ("nvidia.com/gpu", "amd.com/gpu")  # one unit of others may be a slice, or several devices
EXPERT_SPELLINGS: Final = (vllm.EXPERT_PARALLEL, "-ep")
# Arguments by which an engine spans GPUs in a way that this module does not know.
PLACED_BY_USER: Final = "^(-[nr]([=0-9]|$)|-dp[a-z]|--(config(=|$)|nnodes|dist|data.parallel.([^s]|start|size.l)))"
# A size above 1 in arguments that are joined by line breaks. It is short, as each character costs the API server.
SIZE_ABOVE_1: Final = r"(?m)^--?((tensor|pipe|data|prefill)\S*size|[tpd]p|pcp)(=|\n)([2-9]|1[0-9])"
_PLACED_BY_USER: Final = re.compile(PLACED_BY_USER)


@dataclass(frozen=True)
class ParallelSizes:
    """Parallel sizes that arguments have, by flag. Those that they lack are absent."""

    tensor: int | None
    others: tuple[tuple[str, int], ...]

    @property
    def product(self) -> int:
        """The product of all sizes but the tensor parallel one."""
        product = 1
        for _, size in self.others:
            product *= size
        return product

    def gpus_used(self, gpus: int) -> int:
        """GPUs that an engine uses of `gpus`."""
        return gpus if self.tensor is None else self.tensor * self.product

    def text(self) -> str:
        """The sizes as arguments."""
        tensor = () if self.tensor is None else ((TENSOR.flag, self.tensor),)
        return " x ".join(f"{flag} {size}" for flag, size in (*tensor, *self.others))


def parallel_sizes(args: Sequence[object]) -> ParallelSizes:
    """The parallel sizes of arguments; the last occurrence of a flag counts."""
    counts = ((one.flag, last_count(args, one.spellings)) for one in OTHERS)
    return ParallelSizes(
        last_count(args, TENSOR.spellings), tuple((flag, size) for flag, size in counts if size is not None)
    )


def tensor_parallel_size(gpus: int, args: Sequence[object]) -> int:
    """The tensor parallel size of an engine with this many GPUs: what the other sizes leave of them.

    It is all GPUs if the arguments have a tensor parallel size of their own, which wins, or sizes that do not divide
    the GPUs.
    """
    sizes = parallel_sizes(args)
    return gpus if sizes.tensor is not None or gpus % sizes.product else gpus // sizes.product


def is_placed_by_user(args: Sequence[str]) -> bool:
    """Whether arguments spread the engine over GPUs in a way that this module does not know."""
    return any(map(_PLACED_BY_USER.match, args))


def misfit(gpus: int, args: Sequence[str]) -> str | None:
    """Why the parallel sizes do not fit the GPUs of a pod, after "gpus is N"; None if they do, or without GPUs."""
    if gpus == 0 or is_placed_by_user(args):
        return None
    sizes = parallel_sizes(args)
    if sizes.tensor is None:
        return f", which {sizes.text()} does not divide" if gpus % sizes.product else None
    used = sizes.gpus_used(gpus)
    return f", and {sizes.text()} needs {used}" if used > gpus else None


def waste(gpus: int, args: Sequence[str]) -> str | None:
    """What the parallel sizes leave unused, after "gpus is N"; None if they fit exactly, or do not fit."""
    if gpus == 0 or is_placed_by_user(args) or misfit(gpus, args) is not None:
        return None
    sizes = parallel_sizes(args)
    if (used := sizes.gpus_used(gpus)) < gpus:
        return f", of which {sizes.text()} uses {used}"
    if gpus == 1 and any(argument.replace("_", "-") in EXPERT_SPELLINGS for argument in args):
        return f", on which {vllm.EXPERT_PARALLEL} has no effect"
    return None


def data_parallel_size(args: Sequence[object]) -> int:
    """Data parallel ranks of an engine with these arguments."""
    return dict(parallel_sizes(args).others).get(vllm.DATA_PARALLEL_SIZE, 1)
