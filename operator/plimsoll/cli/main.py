"""`plimsoll`: one program with a verb for each process and each question. Also a kubectl plugin."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from plimsoll.cli import render
from plimsoll.core.errors import PlimsollError
from plimsoll.telemetry import logging as telemetry


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 it could not be done, 2 the words were off."""
    arguments = _parser().parse_args(argv)
    telemetry.configure(os.environ.get("PLIMSOLL_LOG_LEVEL", "INFO"))
    try:
        return int(arguments.run(arguments) or 0)
    except PlimsollError as error:
        print(f"plimsoll: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="plimsoll", description="Open LLMs on Kubernetes within a latency promise.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    operator = verbs.add_parser("operator", help="run the operator (in its pod)")
    operator.set_defaults(run=_operator)
    gateway = verbs.add_parser("gateway", help="run a part of the gateway (in its pod)")
    parts = gateway.add_subparsers(required=True, metavar="PART")
    parts.add_parser("init", help="prepare the shared folder for Envoy").set_defaults(run=_gateway_init)
    parts.add_parser("run", help="run the picker").set_defaults(run=_gateway_run)
    render.add_verb(verbs)
    return parser


# Each process loads only its own half: the gateway knows nothing of kopf, the operator nothing of uvloop.


def _operator(_: argparse.Namespace) -> int:
    from plimsoll.controllers import operator, settings

    asyncio.run(operator.run(settings.load()))
    return 0


def _gateway_init(_: argparse.Namespace) -> int:
    from plimsoll.gateway import main as gateway

    gateway.init()
    return 0


def _gateway_run(_: argparse.Namespace) -> int:
    from plimsoll.gateway import main as gateway

    gateway.run()
    return 0
