"""`plimsoll explain NAME`: the last decision step by step, what it rests on, and the decisions before it.

The operator that leads tells it, through the API server, with the rights of whoever asks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable
from typing import Any, Final

from plimsoll.cli import cluster, kubeconfig
from plimsoll.cli.files import say
from plimsoll.cli.output import NONE, Screen, cut, duration, hanging, listed, plain, table
from plimsoll.cli.reading import entries, items, number, part, text, whole

VERSION: Final = 1  # of the document
_INDENT: Final = "  "
_LABELS: Final = ("engine", "model", "", "load line", "forecast", "start-up")
_COEFFICIENTS: Final = (
    ("base_s", "a step"),
    ("any_prefill_s", "more with any prefill"),
    ("prefill_token_s", "a prompt token"),
    ("prefill_pair_s", "a prompt token for each token before it"),
    ("sequence_s", "a sequence"),
    ("cached_token_s", "a cached token read"),
)


def run(arguments: argparse.Namespace) -> int:
    namespace = arguments.namespace or kubeconfig.namespace(arguments.kubeconfig)
    document = asyncio.run(_ask(arguments, namespace))
    if arguments.json:
        say(json.dumps(document, indent=2) + "\n")
    else:
        say("\n".join([*render(document, Screen.of(sys.stdout)), ""]))
    return 0


async def _ask(arguments: argparse.Namespace, namespace: str) -> Any:
    async with cluster.connected(arguments.kubeconfig) as kube:
        return await cluster.explanation(kube, namespace, arguments.name, arguments.operator_namespace)


def render(document: Any, screen: Screen) -> list[str]:
    """The document for a person, in lines. Raises Unanswered for one of another version."""
    if whole(document, "version") != VERSION:
        told = part(document, "version")
        raise cluster.Unanswered(
            f"the operator's document is of version {told!r:.40}, this program reads {VERSION}; --json prints it"
        )
    decisions = items(document, "decisions")
    lines = hanging("", _heading(document, decisions), screen)
    if not decisions:
        lines += ["", "Nothing was decided yet: the operator has only begun to look at it."]
    for last in decisions[:1]:
        lines += _last(last, screen)
    lines += _heard(entries(document, "heard"), screen)
    lines += _basis(entries(document, "tiers"), screen)
    return lines + _before(decisions[1:], screen)


def _heading(document: Any, decisions: list[Any]) -> str:
    """A decision much older than the document says that the operator has stopped deciding."""
    told = f"{text(document, 'service') or NONE} at {text(document, 'at') or NONE}"
    return f"{told}, decided at {text(decisions[0], 'at') or NONE}" if decisions else told


# ---------------------------------------------------------------- the last decision


def _last(decision: Any, screen: Screen) -> list[str]:
    binding = text(decision, "binding")
    lines = []
    for name, tier in entries(decision, "tiers").items():
        binds = ", the tier that binds" if name == binding else ""
        lines += ["", *(screen.bold(line) for line in hanging("", f"{name} {_change(tier)}{binds}", screen))]
        lines += table(_steps(tier), screen, _INDENT, head=False)
        facts = [[label, words] for label, words in _facts(tier) if words]
        lines += ["", *table(facts, screen, _INDENT, head=False)] if facts else []
    return lines


def _change(tier: Any) -> str:
    before, after, wanted = whole(tier, "before"), whole(tier, "replicas"), whole(tier, "recommended")
    if before is None:
        return f"{_count(after)}, not observed"
    if wanted is not None and wanted != after:
        return f"stays {_count(after)}, recommended {wanted}"
    return f"stays {before}" if before == after else f"{before} -> {_count(after)}"


def _steps(tier: Any) -> list[list[str]]:
    return [
        [f"{place}.", text(step, "name") or NONE, _count(whole(step, "replicas")), text(step, "why") or NONE]
        for place, step in enumerate(items(tier, "steps"), 1)
    ]


def _facts(tier: Any) -> Iterable[tuple[str, str]]:
    etas = [number(eta) for eta in items(tier, "etas_s")]
    yield "otherwise", text(tier, "counterfactual") or ""
    yield "limited by", _words(tier, "limits")
    yield "held", "demand is not known, so nothing is concluded from it" if part(tier, "held") is True else ""
    yield "starting", f"{len(etas)}, likely ready in {listed(map(duration, etas))}" if etas else ""
    yield "overdue", _words(tier, "overdue")


# ---------------------------------------------------------------- what was heard


def _heard(heard: dict[str, Any], screen: Screen) -> list[str]:
    """Nothing of an operator that does not tell."""
    if not heard:
        return []
    told = {"gateways": _gateways(part(heard, "gateways")), "requests": _requests(part(heard, "requests"))}
    told |= {name: _engines(tier) for name, tier in entries(heard, "tiers").items()}
    head = f"heard at {text(heard, 'at') or NONE}"
    rows = [[name, words] for name, words in told.items() if words]
    lines = [screen.bold(line) for line in hanging("", head, screen)]
    return ["", *lines, *table(rows, screen, _INDENT, head=False)]


def _gateways(told: Any) -> str:
    if (missing := _silent(told, "rate_per_s")) is not None:
        return missing
    shed, ttft_s = number(told, "shed_share"), number(told, "ttft_s")
    return listed(
        [
            _fresh(told),
            f"{_digits(number(told, 'rate_per_s'))} req/s arrive",
            f"TTFT {duration(ttft_s)}" if ttft_s is not None else "",
            f"{shed:.0%} refused" if shed is not None else "",
            f"{_digits(number(told, 'held'))} held",
            f"{_digits(number(told, 'in_flight'))} sent to engines",
        ]
    )


def _requests(told: Any) -> str:
    if (missing := _unknown(told)) is not None:
        return missing
    cached = number(told, "cached_tokens")
    of_these = f" ({_digits(cached)} cached)" if cached else ""
    prompt, output = number(told, "prompt_tokens"), number(told, "output_tokens")
    return f"{_digits(prompt)} tokens of prompt{of_these} and {_digits(output)} of answer on average"


def _engines(told: Any) -> str:
    missing = _silent(told, "running")
    return missing or listed([_fresh(told), f"{_digits(number(told, 'running'))} requests in them"])


def _silent(told: Any, figure: str) -> str | None:
    """Why nothing is known of them; None where the figure is."""
    why = text(told, figure, "unknown")
    return None if why is None else f"not known: {why}"


def _fresh(told: Any) -> str:
    """How old their words are, and how many of them there are where some say nothing."""
    coverage = number(told, "coverage")
    some = "" if coverage in (None, 1.0) else f"{coverage:.0%} of them answer"
    return listed([f"{duration(number(told, 'age_s'))} old", some])


# ---------------------------------------------------------------- what it rests on


def _basis(tiers: dict[str, Any], screen: Screen) -> list[str]:
    lines = []
    for name, tier in tiers.items():
        told = (_engine(tier), _model(tier), _coefficients(tier), _line(tier), _forecast(tier), _starts(tier))
        rows = [[label, words] for label, words in zip(_LABELS, told, strict=True) if words]
        lines += ["", *(screen.bold(line) for line in hanging("", f"{name} rests on", screen))]
        lines += table(rows, screen, _INDENT, head=False)
    return lines


def _engine(tier: Any) -> str:
    names = ("model", "accelerator", "parallelism", "engine_version")
    return listed(text(tier, "engine", name) or "" for name in names)


def _model(tier: Any) -> str:
    model = part(tier, "model")
    if (missing := _unknown(model)) is not None:
        return missing
    quantile = number(model, "quantile")
    pessimism = f"; sized slower than {quantile:.0%} of what is believed" if quantile is not None else ""
    return f"{text(model, 'words') or NONE}{pessimism}"


def _coefficients(tier: Any) -> str:
    told = [(number(tier, "model", name), words) for name, words in _COEFFICIENTS]
    return listed(f"{duration(value)} {words}" for value, words in told if value is not None)


def _line(tier: Any) -> str:
    line = part(tier, "line")
    if (missing := _unknown(line)) is not None:
        return missing
    knee = f"{_digits(number(line, 'knee_per_s'))} req/s a replica, {text(line, 'constraint') or NONE} binds"
    infeasible = text(line, "infeasible", "words")
    return f"{knee}; {infeasible}" if infeasible else knee


def _forecast(tier: Any) -> str:
    found = part(tier, "forecast")
    if (missing := _unknown(found)) is not None:
        return missing
    parts = ", ".join(f"{name} {_digits(number(value))}" for name, value in entries(found, "parts").items())
    quantile = number(found, "quantile")
    chance = f" at p{100.0 * quantile:.3g}" if quantile is not None else ""
    work, within = _digits(number(found, "work")), duration(number(found, "horizon_s"))
    return f"{work} GPU-s/s within {within}{chance}: {parts or NONE}"


def _starts(tier: Any) -> str:
    phases = [
        f"{text(phase, 'name') or NONE} {duration(number(phase, 'p50_s'))} to {duration(number(phase, 'p90_s'))}"
        for phase in items(tier, "starts", "phases")
    ]
    seen = number(tier, "starts", "seen")
    image = text(tier, "starts", "variant", "image")
    rests = f"starts seen: {seen:.0f}" if seen else f"a guess: no start {f'of {image} ' if image else ''}was seen"
    return f"{', '.join(phases)} (p50 to p90; {rests})" if phases else NONE


def _unknown(value: Any) -> str | None:
    """Why it is not known; None if it is."""
    if not entries(value):
        return NONE
    why = text(value, "unknown")
    return None if why is None else f"not known: {why}"


# ---------------------------------------------------------------- the decisions before


def _before(decisions: list[Any], screen: Screen) -> list[str]:
    if not decisions:
        return []
    lines = [cut(f"{_INDENT}{plain(text(one, 'at') or NONE)}  ", _changes(one), screen) for one in decisions]
    return ["", screen.bold("before, what changed"), *lines]


def _changes(decision: Any) -> str:
    moved = [
        f"{name} {_change(tier)}: {text(tier, 'why') or NONE}"
        for name, tier in entries(decision, "tiers").items()
        if whole(tier, "before") != whole(tier, "recommended")
    ]
    return "; ".join(moved) or NONE


def _words(tier: Any, name: str) -> str:
    return listed(text(one) or "" for one in items(tier, name))


def _count(value: int | None) -> str:
    return NONE if value is None else str(value)


def _digits(value: float | None) -> str:
    return NONE if value is None else f"{value:.3g}"
