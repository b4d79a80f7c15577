"""`plimsoll`: one program with a verb for each process and each question. Also a kubectl plugin."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from plimsoll.core.errors import PlimsollError
from plimsoll.telemetry import logging as telemetry


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 it could not be done, 2 the words were off, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    telemetry.configure(os.environ.get("PLIMSOLL_LOG_LEVEL", "INFO"))
    try:
        status = int(arguments.run(arguments) or 0)
        sys.stdout.flush()
    except PlimsollError as error:
        print(f"plimsoll: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read has enough, as `head` does; Python must not flush at its end again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plimsoll", description="Open LLMs on Kubernetes within a latency promise.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    operator = verbs.add_parser("operator", help="run the operator (in its pod)")
    operator.set_defaults(run=_operator)
    gateway = verbs.add_parser("gateway", help="run a part of the gateway (in its pod)")
    parts = gateway.add_subparsers(required=True, metavar="PART")
    parts.add_parser("init", help="prepare the shared folder for Envoy").set_defaults(run=_gateway_init)
    parts.add_parser("run", help="run the picker").set_defaults(run=_gateway_run)
    _add_render(verbs)
    _add_status(verbs)
    _add_explain(verbs)
    _add_simulate(verbs)
    _add_plan(verbs)
    return parser


def _add_render(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("render", help="print the objects that the operator would apply for a manifest")
    parser.add_argument("-f", "--filename", required=True, metavar="FILE", help="manifest, or - for standard input")
    parser.add_argument("--config", metavar="FILE", help="operator configuration file (the chart's ConfigMap)")
    parser.set_defaults(run=_render)


def _add_status(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("status", help="how services are, or one of them in full")
    parser.add_argument("name", nargs="?", metavar="NAME", help="one service, in full; all of a namespace without it")
    where = _add_namespace(parser)
    where.add_argument("-A", "--all-namespaces", action="store_true", help="services of all namespaces")
    parser.set_defaults(run=_status, refuse=parser.error)


def _add_explain(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("explain", help="why a service has the replicas that it has")
    parser.add_argument("name", metavar="NAME", help="the service")
    _add_namespace(parser)
    parser.add_argument(
        "--operator-namespace", default="plimsoll-system", metavar="NS", help="where the operator runs (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the operator's document as it is")
    parser.set_defaults(run=_explain)


def _add_simulate(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("simulate", help="try a trace against a service, in virtual time and without a cluster")
    add = parser.add_argument
    add("--trace", required=True, metavar="FILE", help=".csv, .jsonl (or the .gz of one) or .parquet of requests")
    add("--service", required=True, metavar="MANIFEST", help="an InferenceService, as for the cluster")
    add("--hardware", required=True, metavar="PROFILE", help="a replica's: a built-in name or a .json file")
    add("--policy", action="append", metavar="P", help="plimsoll, static:K or NAME:key=value,...; may be repeated")
    add("--start-up", default="60", metavar="S", help="of an engine, in s: 60, uniform:100,135 or a file (%(default)s)")
    add("--initial", metavar="N|P,D", help="ready replicas at the start; each tier's least if not given")
    add("--max-gpus", type=int, metavar="N", help="GPUs of the cluster; beyond them pods stay pending")
    add("--rate-scale", type=float, default=1.0, metavar="X", help="so many copies of the trace laid over each other")
    add("--from", type=float, default=0.0, dest="from_s", metavar="S", help="seconds of the trace to begin at")
    add("--to", type=float, default=float("inf"), dest="to_s", metavar="S", help="and to end before")
    add("--gateways", type=int, default=2, metavar="N", help="replicas of the gateway (%(default)s)")
    add("--seed", type=int, default=0, help="seed of all that is drawn (%(default)s)")
    add("--plant-scale", type=float, default=1.0, metavar="X", help="stretches all steps of the engines (%(default)s)")
    add("--spread", type=float, default=0.1, metavar="X", help="how far replicas differ in speed (%(default)s)")
    add("--noise", type=float, default=0.02, metavar="X", help="relative deviation of each step (%(default)s)")
    add("--model-config", metavar="FILE", help="the model's config.json, if engines are to tell it")
    manners = ("none", "honour", "ignore", "mixed")
    add("--clients", choices=manners, default="none", help="what those do who are refused (%(default)s)")
    add("--output", choices=("table", "json", "html"), default="table", help="how the result is shown (%(default)s)")
    add("--requests-out", metavar="FILE", help="a JSON line for each request")
    add("--replicas-out", metavar="FILE", help="a JSON line for each change of a tier")
    add("--windows-out", metavar="FILE", help="a JSON line for each 500 requests")
    add("--decisions-out", metavar="FILE", help="a JSON line for each change of a tier's count, with its reasons")
    parser.set_defaults(run=_simulate)


def _add_plan(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = verbs.add_parser("plan", help="how many GPUs a promise takes, arranged how, before there is a cluster")
    add = parser.add_argument
    add("--model", metavar="NAME|FILE", help="a name such as Llama-3.1-8B, or the path of a config.json")
    add("--gpu", metavar="NAME", help="such as H200")
    add("--hardware", metavar="PROFILE", help="a profile, in place of model and GPU: a built-in name or a .json file")
    add("--weights", choices=("bf16", "fp8"), help="type of the layers' weights, if the model's own do not say")
    add("--kv-cache", choices=("bf16", "fp8"), help="type of keys and values (bf16)")
    add("--gpus-per-replica", type=int, metavar="N", help="only so many GPUs; 1, 2, 4 and 8 are compared if not given")
    add("--ttft", metavar="T", help="target of the first token, such as 500ms")
    add("--ttft-per-k-token", metavar="T", help="added to it for each 1,000 prompt tokens")
    add("--tpot", metavar="T", help="target of each further token, such as 50ms")
    add("--e2e", metavar="T", help="target of the whole answer, such as 20s")
    add("--itl", metavar="T", help="target of the gaps between two tokens, kept by 99 in 100 of them")
    add("--gap", metavar="T", help="no usual gap between two tokens longer than this")
    add("--percentile", type=int, default=95, metavar="N", help="of 100 requests, within targets (%(default)s)")
    add("--trace", metavar="FILE", help="requests, as for simulate; the plan is for the busiest five minutes")
    add("--rate", type=float, metavar="R", help="requests a second")
    add("--prompt-tokens", type=float, metavar="N", help="mean length of prompts")
    add("--output-tokens", type=float, metavar="N", help="mean length of answers")
    add("--prompt-sigma", type=float, metavar="X", help="spread of prompts' lognormal lengths (0.6)")
    add("--output-sigma", type=float, metavar="X", help="spread of answers' lognormal lengths (0.5)")
    add("--cached-share", type=float, default=0.0, metavar="X", help="share of each prompt in the cache (%(default)s)")
    add("--headroom", type=float, default=0.0, metavar="X", help="share of the load line to keep free (%(default)s)")
    add(
        "--fabric-gb-per-s",
        type=float,
        default=50.0,
        metavar="X",
        help="between engines: an RDMA device of 400 Gb/s has 50, NVLink 100, which pods do not get, and TCP 0.2"
        " (%(default)s)",
    )
    add("--accepted-tokens", type=float, default=2.5, metavar="X", help="tokens a step, with drafts (%(default)s)")
    add("--gpu-hour-cost", type=float, metavar="X", help="price of a GPU's hour, in any currency")
    add("--picture", metavar="FILE", help="draw goodput against load there, as SVG")
    add("--json", action="store_true", help="print all figures as JSON")
    parser.set_defaults(run=_plan)


def _add_namespace(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    parser.add_argument("--kubeconfig", metavar="FILE", help="instead of $KUBECONFIG or ~/.kube/config")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-n", "--namespace", metavar="NS", help="the current context's if not given")
    return where


# Each process loads only its own part: the gateway knows nothing of kopf, the operator nothing of uvloop, and questions
# are answered in less time than it takes to build the API's models.


def _operator(_: argparse.Namespace) -> int:
    from plimsoll.cli import garbage
    from plimsoll.controllers import operator, settings

    garbage.look_seldom()
    asyncio.run(operator.run(settings.load()))
    return 0


def _gateway_init(_: argparse.Namespace) -> int:
    from plimsoll.gateway import main as gateway

    gateway.init()
    return 0


def _gateway_run(_: argparse.Namespace) -> int:
    from plimsoll.cli import garbage
    from plimsoll.gateway import main as gateway

    garbage.look_seldom()
    gateway.run()
    return 0


def _render(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import render

    return render.run(arguments)


def _status(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import status

    return status.run(arguments)


def _explain(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import explain

    return explain.run(arguments)


def _simulate(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import simulate

    return simulate.run(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import plan

    return plan.run(arguments)
