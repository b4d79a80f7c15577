"""vLLM's executor without a model. Imported by vLLM, by its class's path; written for vLLM 0.32.

The CPU platform switches asynchronous scheduling off, which accelerators have by default, so that the next step is
composed while one runs. Engine core makes its executor before its scheduler: here it is switched on again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from plimsoll.sim.engine.step_timing import StepTiming
from plimsoll.sim.profiles import HardwareProfile, load
from simulated.twin.step_work import AcceleratorClock, StepWork, StepWorkReader

_IGNORED_METHODS: Final = frozenset(
    ("set_kv_cache_layout", "initialize_from_config", "update_max_model_len", "reset_mm_cache", "reset_encoder_cache")
)


class TwinExecutor(Executor):
    """Settings, in `--additional-config` under `twin`: profile, a name or a file; time_scale, how many times as long
    every step takes on this machine's clock (a machine with few cores serves a fast card only slowed down)."""

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        self.scheduler_config.async_scheduling = True
        settings = self.vllm_config.additional_config["twin"]
        self._profile: HardwareProfile = load(settings["profile"])
        self._accelerator = AcceleratorClock(StepTiming(self._profile), float(settings["time_scale"]))
        self._work_reader = StepWorkReader()
        self._step_work: StepWork | None = None
        self._token = self.model_config.get_vocab_size() - 1
        self._sleep_thread = ThreadPoolExecutor(1)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        """What a worker would answer at the start of an engine. Raises NotImplementedError for everything else."""
        if method == "get_kv_cache_spec":
            return [self._kv_cache_spec()]
        if method == "get_supported_kv_cache_layouts":
            return [[KVCacheLayout.LBHNC.name]]
        if method == "determine_available_memory":
            blocks = self._profile.kv_tokens // self.cache_config.block_size
            return [blocks * sum(layer.page_size_bytes for layer in self._kv_cache_spec().values())]
        if method == "compile_or_warm_up_model":
            return []
        if method == "get_supported_tasks":
            return [("generate",)]
        if method in _IGNORED_METHODS:
            return [None]
        raise NotImplementedError(f"a twin has no worker for {method}")

    def _kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Full attention in every layer, in the shape of the model's config."""
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=self.model_config.get_num_kv_heads(self.parallel_config),
            head_size=self.model_config.get_head_size(),
            dtype=torch.bfloat16,
        )
        layers = self.model_config.get_num_layers(self.parallel_config)
        return {f"model.layers.{number}.self_attn.attn": spec for number in range(layers)}

    def check_health(self) -> None:
        return

    def shutdown(self) -> None:
        self._sleep_thread.shutdown(wait=False)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Takes a step over; its tokens come with `sample_tokens`, which vLLM calls right after."""
        self._step_work = self._work_reader.read(scheduler_output)
        result = None if self._step_work.request_ids else EMPTY_MODEL_RUNNER_OUTPUT
        if not non_block:
            return result
        done: Future[Any] = Future()
        done.set_result(result)
        return done

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """The step's tokens, when the accelerator would be done. Raises RuntimeError where vLLM waits for each step."""
        if not non_block:
            raise RuntimeError("vLLM composes one step at a time: asynchronous scheduling is off")
        work = self._step_work
        assert work is not None
        end_s = self._accelerator.end_s(work, time.monotonic())
        return self._sleep_thread.submit(self._finish, work, end_s)

    def _finish(self, work: StepWork, end_s: float) -> ModelRunnerOutput:
        time.sleep(max(0.0, end_s - time.monotonic()))
        return ModelRunnerOutput(
            req_ids=work.request_ids,
            req_id_to_index={name: place for place, name in enumerate(work.request_ids)},
            sampled_token_ids=[[self._token] if emits else [] for emits in work.emits],
        )
