"""The reference pages that come from code: conditions, Events, metrics.

python docs/generate.py            writes what differs
python docs/generate.py --check    writes nothing, names what differs and exits 1
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry

from plimsoll.api import conditions, events
from plimsoll.telemetry import metrics

FOLDER = Path(__file__).parent / "reference"
KSTATUS = (
    "`Reconciling` and `Stalled` are true when things are *not* as they should be, as kstatus wants it, and so is"
    " `ScalingLimited`; all others are true when things are well. A condition that does not apply is absent. `kubectl"
    " wait --for=condition=Ready plim/NAME` works, and so does Flux."
)


def anchor(text: str) -> str:
    return f'<a id="{text.lower()}"></a>'


def conditions_page() -> str:
    """Types and reasons of conditions."""
    lines = ["# Conditions", "", KSTATUS, "", "| type |", "|---|"]
    lines += [f"| `{kind.value}` |" for kind in conditions.Type]
    lines += ["", "| reason | what it means |", "|---|---|"]
    lines += [f"| {anchor(r.value)}`{r.value}` | {text} |" for r, text in conditions.MEANING.items()]
    return "\n".join(lines) + "\n"


def events_page() -> str:
    """Reasons of Events."""
    intro = (
        "An Event is told when something changes, once; a restart of the operator tells nothing again."
        " `kubectl events --for plim/NAME` lists them."
    )
    lines = ["# Events", "", intro, "", "| reason | type | what happened |", "|---|---|---|"]
    for reason, text in events.MEANING.items():
        kind = "Normal" if reason in events.NORMAL else "Warning"
        lines.append(f"| {anchor(reason.value)}`{reason.value}` | {kind} | {text} |")
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Metrics of the processes that Plimsoll runs; an engine's own stand in engine-image/contract.json."""
    lines = ["# Metrics", ""]
    for title, registry in (
        ("Gateway (picker, port 8081)", metrics.GATEWAY),
        ("Operator (port 8081)", metrics.OPERATOR),
    ):
        lines += [f"## {title}", "", "| metric | type | labels | what it says |", "|---|---|---|---|"]
        lines += list(_rows(registry))
        lines.append("")
    return "\n".join(lines)


def _rows(registry: CollectorRegistry) -> Iterable[str]:
    # The registry has no public list of what is registered; `describe` is what it calls itself.
    for collector in registry._collector_to_names:
        for family in collector.describe():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = ", ".join(f"`{label}`" for label in getattr(collector, "_labelnames", ()))
            yield f"| `{name}` | {family.type} | {labels} | {family.documentation} |"


PAGES = {"conditions.md": conditions_page, "events.md": events_page, "metrics.md": metrics_page}


def main(arguments: list[str]) -> int:
    """Exit status 1 where something differs and only a check was asked for."""
    stale = [name for name, page in PAGES.items() if _text(FOLDER / name) != page()]
    if "--check" in arguments:
        for name in stale:
            print(f"docs/reference/{name} differs: run make generate", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for name in stale:
        (FOLDER / name).write_text(PAGES[name]())
    return 0


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
