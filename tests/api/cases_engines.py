"""What engines cannot do, and fields of engines without a launcher, broken once or more; see `tests.api.cases`."""

from __future__ import annotations

from typing import Any

from tests.api.cases import Case, single_edit
from tests.api.cases_draft import DRAFT_CASES
from tests.api.manifests import aggregated

IMAGE = "example.com/x:1"
LIMITED = {"maxOutputTokens": 100}
NO_LORA = "engine sglang has no LoRA adapters that are loaded while it runs: remove adapters, or use engine vllm"
NO_TUNING = " has no arguments that the operator tunes: remove tuning, or use engine vllm"
NO_SALT = " has no prefix cache for each tenant: remove engine.prefixCache, or use engine vllm or simulated"
PREFIX_CACHE = "spec.engine.prefixCache"
NO_LIMIT = "engine openai has no output limit for requests that state none: "
NO_SERVER = "engine vllm has no command, port, health path and metric names of your own: remove "
NO_TIERS = "engine llama-cpp has no prefill and decode tiers: remove tiers.prefill, or use engine vllm or simulated"
RESERVED_ENV = "on which Plimsoll relies: "
ARGS, METRICS = "spec.engine.args", "spec.engine.metrics"


def _engine(runtime: str, path: str, value: Any, says: str, server: str = "", *, at: str = "", **more: Any) -> Case:
    """A service with one tier of an engine in an image of the user."""
    engine = {"spec.engine.runtime": runtime, "spec.engine.image": IMAGE}
    edits = {**engine, **more.pop("also", {}), path: value}
    return Case(edits, at or path, says, server, base=aggregated, **more)


NODES = "spec.tiers.serve.nodes"
TOPOLOGY = "spec.tiers.serve.exclusiveTopology"
NO_GROUP_FLAGS = "may not have a flag about parallel sizes, nodes, executor or API servers with tiers.serve.nodes above"
GROUP_ARGS = (
    ["--data-parallel-size", "2"],
    ["-dp", "2"],
    ["--api-server-count=2"],
    ["-asc", "2"],
    ["--nnodes", "4"],
    ["-n=4"],
    ["-n4"],
    ["--node_rank", "1"],
    ["-r", "1"],
    ["--master-addr", "x"],
    ["--master_port=1"],
    ["--distributed-executor-backend", "ray"],
    ["--max-num-seqs", "8", "--tensor-parallel-size", "8"],
    ["-tp", "8"],
    ["--pipeline_parallel_size=1"],
    ["-pp", "1"],
    ["-pcp", "2"],
)
SIZES_FIT = "parallel sizes must fit the gpus of each tier: their product is at most gpus"
ONE_GPU_ARGS = (["-dp", "2"], ["--tensor_parallel_size=4"], ["--seed", "1", "-tp=8"], ["-pcp", "16"], ["-pp", "2"])
PROCESSOR = "--mm-processor-kwargs"
BAD_PROCESSOR = f"{PROCESSOR} must be a JSON object, and its bounds of pixels whole numbers above 0"
BAD_PROCESSOR_VALUES = ("1003520", "[1]", '{"max_pixels": "1M"}', '{"min_pixels": 0}', '{"max_pixels":-1}')
NO_NODES = "engine sglang has no engines of several nodes: remove tiers.serve.nodes, or use engine vllm or simulated"

NO_FETCH = (
    "engine llama-cpp has no download of s3://, gs:// and https:// models: name a claim or an image (pvc:// or "
    "oci://), or use engine vllm or simulated"
)

ENGINE_CASES = [
    *DRAFT_CASES,
    *[
        single_edit(f"spec.tiers.{role}.nodes", 2, "nodes above 1 is allowed only for the tier serve")
        for role in ("prefill", "decode")
    ],
    _engine("sglang", NODES, 2, NO_NODES),
    *[
        Case({ARGS: args, **more}, ARGS, SIZES_FIT, base=aggregated)
        for args in ONE_GPU_ARGS
        for more in ({}, {"spec.engine.runtime": "simulated"})
    ],
    Case({ARGS: ["-tp", "2"], "spec.tiers.decode.gpus": 2}, ARGS, SIZES_FIT),  # the prefill tier has one GPU
    *[single_edit(ARGS, [PROCESSOR, value], BAD_PROCESSOR) for value in BAD_PROCESSOR_VALUES],
    single_edit(ARGS, ["--seed", "1", "--mm_processor_kwargs=max_pixels"], BAD_PROCESSOR),
    _engine("llama-cpp", "spec.model.uri", "s3://models/chat", NO_FETCH),
    Case({NODES: 2, TOPOLOGY: "a" * 318}, TOPOLOGY, "must have at most 317 characters", "Too long", base=aggregated),
    *[
        Case({NODES: 2, field: value}, at, says, base=aggregated)
        for field, value, at, says in (
            ("spec.adapters", [{"name": "a", "uri": "hf://org/a"}], "spec.adapters", "LoRA adapters are not supported"),
            ("spec.engine.lora", {}, "spec.adapters", "LoRA adapters are not supported with tiers.serve.nodes above 1"),
            *((ARGS, args, ARGS, NO_GROUP_FLAGS) for args in GROUP_ARGS),
            (TOPOLOGY, "a b", TOPOLOGY, "must be the name of a node label, such as example.com/rack"),
        )
    ],
    Case({"spec.engine": {"runtime": "llama-cpp", "image": IMAGE}}, "spec.tiers.prefill", NO_TIERS),
    *[
        Case(
            {"spec.engine.runtime": runtime},
            "spec.engine.image",
            f"engine {runtime} has no bundled image: image is required",
            base=aggregated,
        )
        for runtime in ("llama-cpp", "sglang", "tensorrt-llm", "tgi", "openai")
    ],
    _engine("sglang", "spec.engine.lora", {}, NO_LORA, at="spec.adapters"),
    *[
        _engine(runtime, "spec.engine.tuning", "Off", f"engine {runtime}{NO_TUNING}")
        for runtime in ("sglang", "openai")
    ],
    Case(
        {"spec.engine": {"runtime": "simulated", "tuning": "Auto"}, "spec.slo": {"ttft": "1s"}},
        "spec.engine.tuning",
        f"engine simulated{NO_TUNING}",
    ),
    *[
        _engine(runtime, PREFIX_CACHE, "PerTenant", f"engine {runtime}{NO_SALT}")
        for runtime in ("llama-cpp", "sglang", "tensorrt-llm", "tgi", "openai")
    ],
    single_edit(PREFIX_CACHE, "Tenant", "be 'Shared' or 'PerTenant'", "Unsupported value"),
    Case(
        {PREFIX_CACHE: "PerTenant", "spec.model.task": "transcribe"},
        PREFIX_CACHE,
        "PerTenant is not allowed with task transcribe: a request with sound takes no salt",
        base=aggregated,
    ),
    *[single_edit("spec.engine.tuning", value, "be 'Auto' or 'Off'", "Unsupported value") for value in ("auto", "On")],
    single_edit(
        "spec.engine.tuning",
        "Auto",
        "slo is required with engine.tuning Auto: the arguments follow from it",
        at="spec.slo",
        base=aggregated,
    ),
    _engine("sglang", "spec.model.task", "score", "engine sglang has no task score: remove model.task, or use engine "),
    *[
        _engine(runtime, "spec.model.task", "embed", f"engine {runtime} has no task embed: remove model.task, ")
        for runtime in ("tensorrt-llm", "tgi")
    ],
    _engine("tgi", "spec.engine.lora", {}, NO_LORA.replace("sglang", "tgi"), at="spec.adapters"),
    _engine("tensorrt-llm", NODES, 2, NO_NODES.replace("sglang", "tensorrt-llm")),
    _engine("llama-cpp", "spec.model.task", "transcribe", "engine llama-cpp has no task transcribe: "),
    _engine(
        "llama-cpp",
        "spec.model.revision",
        "v1",
        "engine llama-cpp has no choice of a model revision: ",
        also={"spec.model.uri": "hf://a/b"},
    ),
    _engine("openai", "spec.requestLimits", LIMITED, NO_LIMIT, at="spec.requestLimits.maxOutputTokens"),
    _engine(
        "openai",
        "spec.admission",
        {"classes": [{"name": "a", "slo": {"ttft": "2s"}, "requestLimits": LIMITED}]},
        NO_LIMIT,
        at="spec.admission.classes",
        also={"spec.slo": {"ttft": "1s"}},
    ),
    *[
        single_edit(f"spec.engine.{field}", value, f"{NO_SERVER}{field}, or use engine openai")
        for field, value in (
            ("command", ["serve"]),
            ("command", []),
            ("port", 9000),
            ("healthPath", "/healthz"),
            ("metrics", {"running": "running"}),
        )
    ],
    *[
        _engine(
            "llama-cpp", ARGS, ["--threads", "4", flag], "may not have a flag that Plimsoll sets (reserved: --host, "
        )
        for flag in ("-m", "--model=x", "-hf", "--metrics", "--api_key")
    ],
    *[
        _engine(runtime, "spec.engine.env", [{"name": "A", "value": "x"}, {"name": name, "value": "x"}], RESERVED_ENV)
        for runtime, name in (
            ("vllm", "VLLM_API_KEY"),
            ("simulated", "VLLM_API_KEY"),
            ("llama-cpp", "LLAMA_API_KEY"),
            ("llama-cpp", "LLAMA_ARG_API_PREFIX"),
            ("llama-cpp", "LLAMA_ARG_HF_REPO"),
            ("tgi", "API_KEY"),
            ("tgi", "NUM_SHARD"),
        )
    ],
    *[
        _engine(
            runtime,
            "spec.engine.env",
            [{"name": name, "valueFrom": {"configMapKeyRef": {"name": "limits", "key": "a"}}}],
            says,
        )
        for runtime, name, says in (
            ("tgi", "MAX_TOTAL_TOKENS", "MAX_BATCH_SIZE or MAX_TOTAL_TOKENS needs value, not valueFrom"),
            ("llama-cpp", "LLAMA_ARG_N_PARALLEL", "LLAMA_ARG_KV_UNIFIED needs value, not valueFrom"),
        )
    ],
    _engine("tensorrt-llm", ARGS, ["--server_role", "CONTEXT"], "may not have a flag that Plimsoll sets "),
    _engine("tensorrt-llm", ARGS, ["--served-model-name", "x"], "may not have a flag that Plimsoll sets "),
    _engine("tgi", ARGS, ["--num-shard", "2"], "may not have a flag that Plimsoll sets "),
    _engine("tgi", ARGS, ["--hostname=::"], "may not have a flag that Plimsoll sets "),
    _engine("sglang", ARGS, ["--host", "--disaggregation-mode"], "may not have a flag that Plimsoll sets "),
    _engine("openai", "spec.engine.command", ["x"] * 33, "must have at most 32 entries", "Too many"),
    _engine(
        "openai", "spec.engine.command", [""], "must not be empty", "at least 1 chars", at="spec.engine.command[0]"
    ),
    _engine(
        "openai",
        "spec.engine.command",
        ["a" * 4097],
        "at most 4096 characters",
        "Too long",
        at="spec.engine.command[0]",
    ),
    *[
        _engine("openai", path, number, says, server, at=at, also={METRICS: {"running": "x"}})
        for path, at in (("spec.engine.port", ""), (f"{METRICS}.port", ""))
        for number, says, server in (
            (80, "must be at least 1024, not 80", "greater than or equal to 1024"),
            (70000, "must be at most 65535, not 70000", "less than or equal to 65535"),
        )
    ],
    *[
        _engine("openai", path, value, says, server, also={METRICS: {"running": "x"}})
        for path in ("spec.engine.healthPath", f"{METRICS}.path")
        for value, says, server in (
            ("", "must not be empty", "at least 1 chars"),
            ("/" + "a" * 253, "must have at most 253 characters", "Too long"),
            ("health", "must be a path, such as /health", ""),
            ("/a b", "must be a path, such as /health", ""),
        )
    ],
    _engine("openai", METRICS, {}, "needs at least one of running, waiting, kvUsed"),
    *[
        _engine("openai", f"{METRICS}.{signal}", value, says, server)
        for signal in (
            "running",
            "waiting",
            "kvUsed",
            "promptTokens",
            "generatedTokens",
            "steps",
            "ttft",
            "tpot",
            "itl",
        )
        for value, says, server in (
            ("", "must not be empty", "at least 1 chars"),
            ("a" * 254, "must have at most 253 characters", "Too long"),
            ('a{b="c"}', "must be a metric's name: letters, digits, '_' and ':', no labels", ""),
        )
    ],
]
