"""The `plimsoll` command with one subcommand per process and query. It is also a kubectl plugin."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

from plimsoll.cli import workload_options
from plimsoll.core.errors import PlimsollError
from plimsoll.telemetry import json_logging as telemetry

_KUBECONFIG_HELP = "kubeconfig (default: $KUBECONFIG or ~/.kube/config)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns the exit status: 0 success, 1 failure, 2 usage error, 130 interrupted."""
    arguments = build_parser().parse_args(argv)
    telemetry.configure(os.environ.get("PLIMSOLL_LOG_LEVEL", "INFO"))
    try:
        status = int(arguments.run(arguments) or 0)
        sys.stdout.flush()
    except PlimsollError as error:
        print(f"plimsoll: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader closed the pipe, as `head` does; prevent a flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return status


class _Parser(argparse.ArgumentParser):
    """A parser, and so its verbs', without abbreviated options: `--name chat` would set the namespace."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    parser: argparse.ArgumentParser = _Parser(
        prog="plimsoll", description="Serve open LLMs on Kubernetes within a latency SLO."
    )
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    operator = subcommands.add_parser("operator", help="run the operator (in its pod)")
    operator.set_defaults(run=_operator)
    gateway = subcommands.add_parser("gateway", help="run a component of the gateway (in its pod)")
    parts = gateway.add_subparsers(required=True, metavar="COMPONENT")
    parts.add_parser("init", help="prepare the directory shared with Envoy").set_defaults(run=_gateway_init)
    parts.add_parser("run", help="run the picker").set_defaults(run=_gateway_run)
    _add_render(subcommands)
    _add_status(subcommands)
    _add_explain(subcommands)
    _add_adopt(subcommands)
    _add_prefetch(subcommands)
    _add_profile(subcommands)
    _add_top(subcommands)
    _add_doctor(subcommands)
    _add_check(subcommands)
    _add_keys(subcommands)
    _add_simulate(subcommands)
    _add_plan(subcommands)
    _add_init(subcommands)
    completion = subcommands.add_parser("completion", help="print a script that completes commands in a shell")
    completion.add_argument("shell", choices=("bash",), help="the shell")
    completion.set_defaults(run=_completion)
    return parser


def _add_render(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser("render", help="print the objects that the operator would apply for a manifest")
    parser.add_argument("-f", "--filename", required=True, metavar="FILE", help="manifest, or - for standard input")
    parser.add_argument("--config", metavar="FILE", help="operator configuration file (the chart's ConfigMap)")
    parser.set_defaults(run=_render)


def _add_status(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser("status", help="list services, or show one in detail")
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="service to show in detail; omit it to list all services"
    )
    group = _add_namespace(parser)
    group.add_argument("-A", "--all-namespaces", action="store_true", help="list the services of all namespaces")
    parser.set_defaults(run=_status, refuse=parser.error)


def _add_explain(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser("explain", help="explain the replica counts of a service")
    parser.add_argument("name", metavar="NAME", help="name of the service")
    _add_namespace(parser)
    parser.add_argument(
        "--operator-namespace", default="plimsoll-system", metavar="NS", help="namespace of the operator (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the operator's JSON document")
    parser.set_defaults(run=_explain)


def _add_adopt(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser("adopt", help="find engines in the cluster and print manifests with targets")
    group = _add_namespace(parser)
    group.add_argument("-A", "--all-namespaces", action="store_true", help="search all namespaces")
    parser.add_argument(
        "--metrics-pages",
        action="store_true",
        help="also GET /metrics from declared ports of at most 20 other pods, which needs get on pods/proxy",
    )
    parser.set_defaults(run=_adopt)


def _add_prefetch(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser("prefetch", help="print the Job or DaemonSet that downloads a service's model")
    parser.add_argument("name", metavar="NAME", help="name of the service")
    parser.add_argument(
        "--ahead",
        metavar="DURATION",
        help="print CronJobs that download into the service's claim this long before each period of "
        "spec.scaling.schedule that raises minReplicas, such as 30m",
    )
    _add_namespace(parser)
    parser.set_defaults(run=_prefetch)


def _add_profile(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "profile", help="measure an engine without other requests, and write its hardware profile for plan and simulate"
    )
    workload_options.add_profile_options(parser)
    _add_namespace(parser)
    parser.set_defaults(run=_profile)


def _add_top(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser("top", help="show the load of services, again and again in a terminal")
    group = _add_namespace(parser)
    group.add_argument("-A", "--all-namespaces", action="store_true", help="show the services of all namespaces")
    parser.add_argument(
        "--operator-namespace", default="plimsoll-system", metavar="NS", help="namespace of the operator (%(default)s)"
    )
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between two tables (%(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="print one table, as where the output is no terminal")
    parser.set_defaults(run=_top, refuse=parser.error)


def _add_doctor(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "doctor", help="find what is wrong with a service, and what to do; the exit status is 1 if something is"
    )
    parser.add_argument("name", metavar="NAME", help="name of the service")
    _add_namespace(parser)
    parser.add_argument(
        "--operator-namespace", default="plimsoll-system", metavar="NS", help="namespace of the operator (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=_doctor)


def _add_check(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "check", help="find what a cluster lacks, and the values to set; the exit status is 1 if something is missing"
    )
    parser.add_argument("--pre", action="store_true", help="check before the installation")
    parser.add_argument("-f", "--filename", metavar="FILE", help="manifests to check as well, or - for standard input")
    parser.add_argument("--kubeconfig", metavar="FILE", help=_KUBECONFIG_HELP)
    parser.add_argument("-n", "--namespace", metavar="NS", help="check the services of one namespace (default: all)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=_check)


def _add_keys(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser("key", help="make, list and revoke API keys of the gateway")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    create = verbs.add_parser("create", help="make an API key and print it, once")
    add_argument = create.add_argument
    add_argument("name", metavar="NAME", help="name of the key and of its Secret")
    add_argument("--tenant", metavar="T", help="tenant of its requests (default: NAME)")
    add_argument(
        "--class", dest="request_class", metavar="C", help="class of its requests (default: the default class)"
    )
    add_argument("--models", metavar="M,...", help="model names or NAMESPACE/NAME, separated by commas (default: all)")
    add_argument("--requests-per-minute", metavar="N", help="limit on requests (default: none)")
    add_argument("--tokens-per-minute", metavar="N", help="limit on prompt and output tokens (default: none)")
    add_argument("--expires", metavar="T", help="a time such as 2027-01-31T00:00:00Z, or a duration such as 30d")
    revoke = verbs.add_parser("revoke", help="revoke an API key: delete its Secret")
    revoke.add_argument("name", metavar="NAME", help="name of the key")
    list_all = verbs.add_parser("list", help="list API keys with their limits, without the keys themselves")
    for verb, run in ((create, _key_create), (list_all, _key_list), (revoke, _key_revoke)):
        verb.add_argument("--kubeconfig", metavar="FILE", help=_KUBECONFIG_HELP)
        verb.add_argument(
            "-n", "--namespace", default="plimsoll-system", metavar="NS", help="namespace of the gateway (%(default)s)"
        )
        verb.set_defaults(run=run)


def _add_simulate(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "simulate", help="simulate a service on a trace, in virtual time and without a cluster"
    )
    workload_options.add_simulate_options(parser)
    parser.set_defaults(run=_simulate)


def _add_plan(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser("plan", help="plan the GPUs and the arrangement for an SLO, without a cluster")
    workload_options.add_plan_options(parser)
    parser.add_argument("--gpu-hour-cost", type=float, metavar="X", help="price of one GPU per hour, in any currency")
    parser.add_argument("--picture", metavar="FILE", help="write a chart of goodput against load as SVG")
    parser.add_argument("--json", action="store_true", help="print all results as JSON")
    parser.set_defaults(run=_plan)


def _add_init(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser("init", help="print the manifest of a new service, as planned; asks in a terminal")
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the service (default: from the location)")
    parser.add_argument("--uri", metavar="URI", help="location of the weights (default: hf://MODEL)")
    parser.add_argument("-n", "--namespace", metavar="NS", help="namespace in the manifest (default: none)")
    parser.add_argument(
        "--node-selector", action="append", metavar="LABEL=VALUE", help="label of the nodes with the GPU; repeatable"
    )
    workload_options.add_plan_options(parser)
    parser.set_defaults(run=_init)


def _add_namespace(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    parser.add_argument("--kubeconfig", metavar="FILE", help=_KUBECONFIG_HELP)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-n", "--namespace", metavar="NS", help="namespace (default: that of the current context)")
    return group


# Each process imports only what it needs: the gateway no kopf, the operator no uvloop, and the queries no API models,
# whose import takes longer than a query.


def _operator(_: argparse.Namespace) -> int:
    from plimsoll.cli import gc_tuning
    from plimsoll.controllers import operator, operator_config
    from plimsoll.controllers.autoscale.service_snapshot import DEFAULT_SLO_SHARE
    from plimsoll.core.capacity import windowed_slo

    gc_tuning.reduce_full_collections()
    windowed_slo.prepare(DEFAULT_SLO_SHARE)
    asyncio.run(operator.run(operator_config.load_config()))
    return 0


def _gateway_init(_: argparse.Namespace) -> int:
    from plimsoll.gateway import main as gateway

    gateway.init()
    return 0


def _gateway_run(_: argparse.Namespace) -> int:
    from plimsoll.cli import gc_tuning
    from plimsoll.gateway import main as gateway

    gc_tuning.reduce_full_collections()
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


def _adopt(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import adopt

    return adopt.run(arguments)


def _prefetch(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import prefetch

    return prefetch.run(arguments)


def _profile(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import profile

    return profile.run(arguments)


def _top(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import top

    return top.run(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import doctor

    return doctor.run(arguments)


def _check(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import check

    return check.run(arguments)


def _key_create(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import keys

    return keys.create(arguments)


def _key_list(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import keys

    return keys.list_all(arguments)


def _key_revoke(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import keys

    return keys.revoke(arguments)


def _simulate(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import simulate

    return simulate.run(arguments)


def _plan(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import plan

    return plan.run(arguments)


def _init(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import init

    return init.run(arguments)


def _completion(arguments: argparse.Namespace) -> int:
    from plimsoll.cli import completion

    return completion.run(arguments)
