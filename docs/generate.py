"""The references that come from code: conditions, Events, metrics, the command line, the schema of recommendations.

python docs/generate.py            writes what differs
python docs/generate.py --check    writes nothing, names what differs and exits 1
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families

from plimsoll.api import conditions, events, recommendation
from plimsoll.api.next_steps import NEXT_STEPS
from plimsoll.cli import main as cli
from plimsoll.telemetry import gateway_metrics, operator_metrics

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"
ENGINE_IMAGE = str(ROOT / "engine-image")
KSTATUS_NOTE = (
    "`Ready` and `SLOMet` are true when things are well. All others exist only while they are true, and `SLOMet` only"
    " with an SLO. The message has object, measured values and remedy. All"
    " refer to the spec of `status.observedGeneration`. `kubectl wait --for=condition=Ready plim/NAME` works, as do"
    " Flux and other users of kstatus. `--for=condition=Stalled=false` waits for ever, because an absent condition is"
    " not false. To wait for engines, use `kubectl wait --for=jsonpath='{.status.tiers.serve.summary}'=2/2 plim/NAME`."
)
METRICS_INTRO = (
    "Braces have the labels. Names that end in `_total` are counters. Others are gauges, unless marked as histograms."
)


def conditions_page() -> str:
    """Types and reasons of conditions."""
    lines = ["# Conditions", "", KSTATUS_NOTE, "", "| type | what it means while it is true |", "|---|---|"]
    lines += [f"| `{kind.value}` | {conditions.TYPE_MEANINGS[kind]} |" for kind in conditions.ConditionType]
    lines += ["", "| reason | what it means | what to do |", "|---|---|---|"]
    lines += [f"| `{r.value}` | {text} | {NEXT_STEPS[r]} |" for r, text in conditions.REASON_MEANINGS.items()]
    return "\n".join(lines) + "\n"


def events_page() -> str:
    """Reasons of Events."""
    intro = (
        "The operator emits an Event once when something changes. `kubectl events --for plim/NAME` lists them, with"
        " details in the message."
    )
    described = {name.value for names in (conditions.ConditionType, conditions.ConditionReason) for name in names}
    warnings = [reason for reason in events.EVENT_MEANINGS if reason not in events.NORMAL_REASONS]
    as_conditions = [reason for reason in warnings if reason.value in described]
    others = [reason for reason in warnings if reason not in as_conditions]
    lines = ["# Events", "", intro, "", "Warnings that [conditions](conditions.md) explain:"]
    lines += [", ".join(f"`{reason.value}`" for reason in as_conditions) + "."]
    for title, reasons in (("other warnings", others), ("of type Normal", events.NORMAL_REASONS)):
        lines += ["", f"| {title} | meaning |", "|---|---|"]
        lines += [
            f"| `{reason.value}` | {text} |" for reason, text in events.EVENT_MEANINGS.items() if reason in reasons
        ]
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Metrics of the processes that Plimsoll runs, and of what it adds to an engine."""
    lines = ["# Metrics", "", METRICS_INTRO, ""]
    for title, rows in (
        ("Gateway (picker, port 8081)", _rows(gateway_metrics.GATEWAY)),
        ("Operator (port 8081)", _rows(operator_metrics.OPERATOR)),
        ("Engine (launcher, port 8001)", engine_rows()),
    ):
        lines += [f"## {title}", "", "| metric | what it says |", "|---|---|", *rows, ""]
    lines.append("The launcher's port also has all metrics of the engine itself (`vllm:...`).")
    return "\n".join(lines) + "\n"


def engine_rows() -> Iterator[str]:
    """What launcher and middleware measure, as a fresh engine tells it, with the values that a label may have."""
    if ENGINE_IMAGE not in sys.path:
        sys.path.append(ENGINE_IMAGE)  # a program of another image: it is not installed here
    from launcher import contract, health, middleware_metrics, startup_phases, tls

    metric_families = contract.load({})
    start = startup_phases.StartupPhases(metric_families.startup_phases, 0.0)
    for phase in metric_families.startup_phases:
        start.end(phase, 0.0)
    adapter = [{"name": "NAME", "loaded": True}]
    text = health.render_metrics(metric_families, health.EngineStatus(), start, adapter, tls.CertificateStatus(1.0))
    for family in text_string_to_metric_families(text):
        yield _row(_with_values(family), dict.fromkeys(label for sample in family.samples for label in sample.labels))
    registry = CollectorRegistry()
    middleware_metrics.MiddlewareMetrics(metric_families, registry)
    for collector in registry._collector_to_names:
        for family in collector.collect():
            yield _row(_with_values(family), collector._labelnames)


def _with_values(family: Metric) -> Metric:
    """Says the values of its only label: the series that exist from the start are all that there are."""
    values = dict.fromkeys(pair for sample in family.samples for pair in sample.labels.items())
    if values:
        label = next(iter(values))[0]
        listed = ", ".join(value for _, value in values)
        family.documentation = f"{family.documentation.removesuffix('.')} ({label}: {listed})."
    return family


def _rows(registry: CollectorRegistry) -> Iterator[str]:
    # The registry has no public list of what is registered; `describe` is what it calls itself.
    for collector in registry._collector_to_names:
        for family in collector.describe():
            yield _row(family, getattr(collector, "_labelnames", ()))


def _row(family: Metric, labels: Iterable[str]) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    listed = ",".join(labels)
    kind = " (histogram)" if family.type == "histogram" else ""
    return f"| `{name}{f'{{{listed}}}' if listed else ''}`{kind} | {family.documentation} |"


CLI_INTRO = (
    "`pip install .` in a checkout installs the program `plimsoll`, also as the kubectl plugin `kubectl plimsoll`, as"
    " does `kubectl krew install --manifest-url` with a release's `krew-plimsoll.yaml`."
    " kubectl's completion covers it. `source <(plimsoll completion bash)` does so for `plimsoll`, in bash only.\n\n"
    "Exit status: 0 success, 1 failure, 2 usage error, 130 interrupted. Logs go to standard error at the level of "
    "`PLIMSOLL_LOG_LEVEL` (`INFO`).\n"
)
SHARED_BY = 3  # verbs with an option from which on it is listed once for all of them
SEE_ALSO = {
    "status": "[Explain a scaling decision](../tasks/explain-a-decision.md)",
    "explain": "[Explain a scaling decision](../tasks/explain-a-decision.md)",
    "simulate": "[Simulate](../tasks/simulate.md), [other autoscalers](../evaluation/baselines.md)",
    "check": "[Check a cluster](../tasks/check.md)",
    "init": "[Plan](../tasks/plan.md#a-manifest)",
    "plan": "[Plan](../tasks/plan.md), [choose an SLO](../tasks/choose-an-slo.md)",
}
SAME_OPTIONS = {"init": "plan"}  # a verb with the options of another one, which are listed there


def cli_page() -> str:
    """Verbs, arguments and options of the program, from the parser that reads them."""
    verbs = list(_verbs(cli.build_parser()))
    lines = ["# The command line", "", CLI_INTRO]
    shared = _shared_options([parser for parser, _ in verbs])
    lines += ["## Shared options", "", "| argument | what it is | verbs |", "|---|---|---|"]
    lines += [f"{row} {', '.join(f'`{verb}`' for verb in users)} |" for row, users in shared.items()]
    rows_of = {
        parser.prog.removeprefix("plimsoll "): [_option(action) for action in _own_options(parser)]
        for parser, _ in verbs
    }
    for parser, text in verbs:
        verb = parser.prog.removeprefix("plimsoll ")
        lines += ["", f"## {parser.prog}", "", _sentence(text)]
        other = SAME_OPTIONS.get(verb, "")
        elsewhere = {*shared, *rows_of.get(other, ())}
        rows = [row for row in rows_of[verb] if row not in elsewhere]
        if other:
            lines += [
                "",
                f"Also most options of [`{other}`](#plimsoll-{other}).",
            ]
        if rows:
            lines += ["", "| argument | what it is |", "|---|---|", *rows]
        see = SEE_ALSO.get(verb)
        if see:
            lines += ["", f"More: {see}."]
    return "\n".join(lines) + "\n"


def _verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Every parser that runs something, with its help; argparse has no public way to its parts."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                yield from list(_verbs(child)) or [(child, helps[name])]


def _shared_options(parsers: list[argparse.ArgumentParser]) -> dict[str, list[str]]:
    """Rows of options that at least SHARED_BY verbs have, with these verbs."""
    users: dict[str, list[str]] = {}
    for parser in parsers:
        for action in _own_options(parser):
            if action.option_strings:
                users.setdefault(_option(action), []).append(parser.prog.removeprefix("plimsoll "))
    return {row: verbs for row, verbs in users.items() if len(verbs) >= SHARED_BY}


def _own_options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def _is_required(action: argparse.Action) -> bool:
    return bool(action.option_strings) and action.required


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices is not None:
        return "|".join(str(choice) for choice in action.choices)
    return str(action.metavar or action.dest.upper())


def _option(action: argparse.Action) -> str:
    shown = f"{', '.join(action.option_strings)} {_value(action)}".strip().replace("|", "\\|")
    text = (action.help or "").removesuffix("(%(default)s)").strip() % vars(action)
    none = action.default is None or action.default is False or action.default == math.inf
    default = "" if none else f" (`{action.default}`)"
    return f"| `{shown}` | {text}{'; required' if _is_required(action) else ''}{default} |"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def recommendations_schema() -> str:
    """JSON schema of `GET /v1/recommendations`."""
    return json.dumps(recommendation.json_schema(), indent=2) + "\n"


PAGES = {
    "cli.md": cli_page,
    "conditions.md": conditions_page,
    "events.md": events_page,
    "metrics.md": metrics_page,
    "recommendations.schema.json": recommendations_schema,
}


def main(arguments: list[str]) -> int:
    """Exit status 1 where something differs and only a check was asked for."""
    outdated = [name for name, page in PAGES.items() if _text(FOLDER / name) != page()]
    if "--check" in arguments:
        for name in outdated:
            print(f"docs/reference/{name} differs: run make generate", file=sys.stderr)
        return 1 if outdated else 0
    FOLDER.mkdir(exist_ok=True)
    for name in outdated:
        (FOLDER / name).write_text(PAGES[name]())
    return 0


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
