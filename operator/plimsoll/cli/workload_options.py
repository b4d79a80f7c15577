"""Options of the verbs that need no cluster: `simulate`, and what `plan` and `init` ask for."""

from __future__ import annotations

import argparse

from plimsoll.engines import vllm


def add_simulate_options(parser: argparse.ArgumentParser) -> None:
    """Trace, service, hardware, and how the simulation differs from its defaults."""
    add_argument = parser.add_argument
    add_argument("--trace", required=True, metavar="FILE", help="requests as .csv, .jsonl (also .gz) or .parquet")
    add_argument("--service", required=True, metavar="MANIFEST", help="manifest of an InferenceService")
    add_argument(
        "--hardware",
        required=True,
        metavar="PROFILE",
        help="hardware profile of a replica: a built-in name or a .json file",
    )
    add_argument("--policy", action="append", metavar="P", help="plimsoll, static:K or NAME:key=value,...; repeatable")
    add_argument(
        "--start-up",
        default="60",
        metavar="S",
        help="start-up time of an engine in s: 60, uniform:100,135 or a file (%(default)s)",
    )
    add_argument("--initial", metavar="N|P,D", help="ready replicas at the start (default: minReplicas of each tier)")
    add_argument("--max-gpus", type=int, metavar="N", help="GPUs of the cluster; further pods stay pending")
    add_argument(
        "--rate-scale", type=float, default=1.0, metavar="X", help="scale factor of the arrival rate (%(default)s)"
    )
    add_argument("--from", type=float, default=0.0, dest="from_s", metavar="S", help="start time in the trace, in s")
    add_argument(
        "--to",
        type=float,
        default=float("inf"),
        dest="to_s",
        metavar="S",
        help="end time in the trace, in s (exclusive)",
    )
    add_argument("--gateways", type=int, default=2, metavar="N", help="gateway replicas (%(default)s)")
    add_argument("--seed", type=int, default=0, help="random seed (%(default)s)")
    add_argument(
        "--plant-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="scale factor of the engines' step times (%(default)s)",
    )
    add_argument(
        "--spread", type=float, default=0.1, metavar="X", help="relative spread of speed between replicas (%(default)s)"
    )
    add_argument("--noise", type=float, default=0.02, metavar="X", help="relative noise of each step (%(default)s)")
    add_argument("--model-config", metavar="FILE", help="config.json of the model that engines report")
    retry_behaviors = ("none", "honour", "ignore", "mixed")
    add_argument(
        "--clients", choices=retry_behaviors, default="none", help="retry behaviour of rejected clients (%(default)s)"
    )
    add_argument(
        "--output", choices=("table", "json", "html"), default="table", help="format of the result (%(default)s)"
    )
    add_argument("--requests-out", metavar="FILE", help="write a JSON line per request")
    add_argument("--replicas-out", metavar="FILE", help="write a JSON line per change of a tier")
    add_argument("--windows-out", metavar="FILE", help="write a JSON line per 500 requests")
    add_argument(
        "--decisions-out", metavar="FILE", help="write a JSON line per change of a replica count, with its reasons"
    )


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Model, GPU, SLO and workload of a plan."""
    add_argument = parser.add_argument
    add_argument("--model", metavar="NAME|FILE", help="model name such as Llama-3.1-8B, or the path of a config.json")
    add_argument("--gpu", metavar="NAME", help="GPU name such as H200")
    add_argument(
        "--hardware",
        metavar="PROFILE",
        help="hardware profile instead of model and GPU: a built-in name or a .json file",
    )
    add_argument("--weights", choices=("bf16", "fp8"), help="type of the weights if the model's config has none")
    add_argument("--kv-cache", choices=("bf16", "fp8"), help="type of the KV cache (bf16)")
    add_argument(
        "--gpus-per-replica", type=int, metavar="N", help="GPUs of each replica (default: compare 1, 2, 4 and 8)"
    )
    add_argument(
        "--max-loras", type=int, metavar="N", help="LoRA adapters in GPU memory, which they take from the KV cache"
    )
    add_argument(
        "--max-lora-rank",
        type=int,
        metavar="N",
        help="highest rank of an adapter: 8, 16, 32, 64, 128, 256, 320 or 512 (default: 16)",
    )
    add_argument("--ttft", metavar="T", help="TTFT target, such as 500ms")
    add_argument("--ttft-per-k-token", metavar="T", help="time added to the TTFT target per 1,000 prompt tokens")
    add_argument("--tpot", metavar="T", help="TPOT target, such as 50ms")
    add_argument("--e2e", metavar="T", help="end-to-end latency target, such as 20s")
    add_argument("--itl", metavar="T", help="target of the 99th percentile of the inter-token latency")
    add_argument("--itl-limit", metavar="T", help="limit of the longest regular inter-token latency")
    add_argument(
        "--percentile",
        type=int,
        default=95,
        metavar="N",
        help="percentage of requests that must meet the targets (%(default)s)",
    )
    add_argument("--trace", metavar="FILE", help="requests, as for simulate; the plan uses the busiest five minutes")
    add_argument("--rate", type=float, metavar="R", help="arrival rate in requests/s")
    add_argument("--prompt-tokens", type=float, metavar="N", help="mean prompt length in tokens")
    add_argument("--output-tokens", type=float, metavar="N", help="mean output length in tokens")
    add_argument("--prompt-sigma", type=float, metavar="X", help="sigma of the lognormal prompt lengths (0.6)")
    add_argument("--output-sigma", type=float, metavar="X", help="sigma of the lognormal output lengths (0.5)")
    add_argument(
        "--cached-share",
        type=float,
        default=0.0,
        metavar="X",
        help="share of each prompt in the prefix cache (%(default)s)",
    )
    add_argument(
        "--headroom", type=float, default=0.0, metavar="X", help="share of the SLO capacity to keep free (%(default)s)"
    )
    add_argument(
        "--fabric-gb-per-s",
        type=float,
        default=50.0,
        metavar="X",
        help="KV transfer bandwidth between engines: 50 for 400 Gb/s RDMA, 0.2 for TCP, 100 for NVLink, which pods"
        " cannot use (%(default)s)",
    )
    add_argument("--no-simulation", action="store_true", help="print what the model alone says, within about a second")
    add_argument(
        "--accepted-tokens",
        type=float,
        default=2.5,
        metavar="X",
        help="mean tokens per step with speculative decoding (%(default)s)",
    )


def add_profile_options(parser: argparse.ArgumentParser) -> None:
    """The engine to measure, bounds, and limits of the engine."""
    add_argument = parser.add_argument
    add_argument("target", metavar="URL|NAME", help="the engine as http://HOST:PORT, or a service: one of its pods")
    add_argument("--output", metavar="FILE", help="write the profile to a file")
    add_argument("--model", metavar="NAME", help="model name of the requests (default: the first that is listed)")
    add_argument("--config", metavar="FILE", help="config.json of the model (default: what the engine states)")
    add_argument("--requests", type=int, default=1500, metavar="N", help="most requests to send (%(default)s)")
    add_argument("--seconds", type=float, default=120.0, metavar="S", help="longest measurement (%(default)s)")
    add_argument(vllm.MAX_NUM_SEQS, type=int, metavar="N", help="sequences that the engine runs at once")
    add_argument(vllm.MAX_NUM_BATCHED_TOKENS, type=int, metavar="N", help="tokens that a step computes at most")
    add_argument("--kv-tokens", type=int, metavar="N", help="tokens of the KV cache")
    add_argument(vllm.MAX_MODEL_LEN, type=int, metavar="N", help="tokens of the longest request")
