"""The pages that come from code are what the code says, and an engine's metrics what a launcher exposes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from docs import generate
from launcher import contract, middleware_metrics
from launcher.health import EngineStatus, HealthServer
from launcher.settings import TlsSettings
from launcher.startup_phases import StartupPhases
from launcher.tls import CertificateStatus, EngineTls
from plimsoll.cli import main as cli


@pytest.mark.parametrize("name", generate.PAGES)
def test_generated_page_matches_code(name: str) -> None:
    assert (generate.FOLDER / name).read_text() == generate.PAGES[name](), "run `make generate`"


async def _nothing() -> bytes:
    return b""


async def test_metrics_page_lists_exactly_exposed_engine_metrics() -> None:
    engine_contract, registry = contract.load({}), CollectorRegistry()
    middleware_metrics.MiddlewareMetrics(engine_contract, registry)
    phases = StartupPhases(engine_contract.startup_phases, 0.0)
    tls = EngineTls(TlsSettings("team/tls", "engine", "release"), Path(), Path(), CertificateStatus(1.0))
    server = HealthServer(engine_contract, EngineStatus(), phases, _nothing, lambda: b"", tls=tls)
    _, launchers = await server.respond(engine_contract.paths["metrics"])
    exposed = set(re.findall(r"^# TYPE (\S+)", (launchers + generate_latest(registry)).decode(), re.MULTILINE))
    listed = set(re.findall(r"^\| `(plimsoll_engine_\w+)[`{]", generate.metrics_page(), re.MULTILINE))
    assert (
        listed == {name for name in exposed if not name.endswith("_created")} == set(engine_contract.metrics.values())
    )


def test_metrics_page_lists_each_metric_once() -> None:
    listed = re.findall(r"^\| `(plimsoll_\w+)[`{]", generate.metrics_page(), re.MULTILINE)
    assert [name for name in dict.fromkeys(listed) if listed.count(name) > 1] == []


def test_engine_metric_names_come_only_from_contract() -> None:
    names = re.compile(r"plimsoll_engine_\w+")
    sources = (Path(generate.ENGINE_IMAGE) / "launcher").glob("*.py")
    assert [path.name for path in sources if names.search(path.read_text())] == []


def test_cli_page_documents_every_command_and_argument() -> None:
    page = generate.cli_page()
    parsers = [parser for parser, _ in generate._verbs(cli.build_parser())]
    assert len(parsers) >= 8
    for parser in parsers:
        assert f"\n## {parser.prog}\n" in page
        for action in parser._actions:
            assert action.help, f"{parser.prog} {action.dest}"


def test_cli_page_gives_a_nested_verb_no_options_of_its_namesake() -> None:
    _, _, rest = generate.cli_page().partition("\n## plimsoll gateway init\n")
    assert rest.partition("\n## ")[0].strip() == "Prepare the directory shared with Envoy."


@pytest.mark.parametrize(
    "line",
    [
        "## plimsoll operator",
        "| `NAME` | service to show in detail; omit it to list all services |",
        "| `--seed SEED` | random seed (`0`) |",
        "| `--to S` | end time in the trace, in s (exclusive) |",
        "| `-f, --filename FILE` | manifest, or - for standard input; required |",
        r"| `--output table\|json\|html` | format of the result (`table`) |",
    ],
)
def test_cli_page_has_a_row_per_argument(line: str) -> None:
    assert line in generate.cli_page().splitlines()


def test_cli_page_lists_a_shared_option_once_with_its_verbs() -> None:
    rows = [line for line in generate.cli_page().splitlines() if line.startswith("| `--kubeconfig FILE`")]
    assert len(rows) == 1
    for parser, _ in generate._verbs(cli.build_parser()):
        takes = any("--kubeconfig" in action.option_strings for action in parser._actions)
        assert (f"`{parser.prog.removeprefix('plimsoll ')}`" in rows[0]) is takes


def test_verbs_include_nested_subcommands() -> None:
    parser = argparse.ArgumentParser(prog="p")
    outer = parser.add_subparsers().add_parser("outer", help="o")
    outer.add_subparsers().add_parser("inner", help="i")
    assert [(found.prog, text) for found, text in generate._verbs(parser)] == [("p outer inner", "i")]
