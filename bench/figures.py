"""`python -m bench figures`: the size of the code and of the docs, and how much code one decision and one request pass.

Then the private words of `bench/private_words.txt` that are left, and the seconds of the last runs of `make` and CI in
`build/log`.

Problem: a project is easier to read if fewer files must be read to follow one decision or one request. Idea: a profile
hook records each file of `plimsoll` in which a function is called: during one scaling decision of one service with two
tiers and new metrics, and during one admitted request at a picker in a service with an SLO.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np

from bench.core import tick_cost
from plimsoll.core.autoscaling.fleet_decisions import decide_all
from plimsoll.core.workload import from_samples
from tests.gateway.picker_harness import PickerHarness, engine_names, picked_engine, service_with_slo

ROOT: Final = Path(__file__).resolve().parents[1]
_CODE: Final = "operator/plimsoll"
_CORE: Final = "operator/plimsoll/core"
_NOT_FOR_USERS: Final = ("evaluation", "design")  # folders of docs
_PRIVATE_WORDS: Final = "bench/private_words.txt"
_WORDED: Final = {
    "operator/plimsoll": ("py",),
    "engine-image": ("py",),
    "charts": ("yaml", "tpl"),
    "crds": ("yaml",),
    "docs": ("md",),
}
_SETTLED_TICKS: Final = 90
_RATE: Final = 5.0  # requests/s of the service that is decided about


def count_code(root: Path, folder: str) -> tuple[int, int]:
    """Files of Python below a folder of the tree, and their lines."""
    files = sorted((root / folder).rglob("*.py"))
    return len(files), sum(len(path.read_text().splitlines()) for path in files)


def _is_for_users(root: Path, path: Path) -> bool:
    return not set(_NOT_FOR_USERS) & set(path.relative_to(root).parts)


def count_words(root: Path) -> int:
    """Words of the pages in docs that users read: what has a letter or a digit, so no bars of tables."""
    pages = (path for path in (root / "docs").rglob("*.md") if _is_for_users(root, path))
    return sum(any(map(str.isalnum, word)) for path in pages for word in path.read_text().split())


def private_words(root: Path) -> list[str]:
    """The words to search, without comments."""
    lines = (root / _PRIVATE_WORDS).read_text().splitlines()
    return [word for line in lines if not line.startswith("#") for word in line.split()]


def count_private_words(root: Path) -> Counter[str]:
    """Uses of each private word that is left, as a part of an identifier between underscores or as a whole word."""
    search = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(map(re.escape, private_words(root)))})(?![A-Za-z0-9])")
    found = Counter[str]()
    for folder, suffixes in _WORDED.items():
        for suffix in suffixes:
            for path in (root / folder).rglob(f"*.{suffix}"):
                if _is_for_users(root, path):
                    found.update(search.findall(path.read_text()))
    return found


def stage_seconds(root: Path) -> dict[str, int]:
    """Seconds of the last run of each stage of `make` and `.ci/run`, as `.ci/stage` wrote them."""
    return {path.stem: int(path.read_text()) for path in sorted((root / "build/log").glob("*.seconds"))}


def traced_files(root: Path, folder: str, action: Callable[[], object]) -> list[str]:
    """Files below a folder of the tree in which an action calls functions, in the order of the first call."""
    base, found = str(root / folder), dict[str, None]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(base):
            found[frame.f_code.co_filename.removeprefix(base).lstrip("/")] = None

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return list(found)


def one_decision() -> Callable[[], object]:
    """The next decision about a service that has been decided about for a while."""
    rng = np.random.default_rng(0)
    mix = from_samples(rng.lognormal(6.7, 0.4, 256), np.zeros(256), rng.lognormal(5.3, 0.4, 256))
    services, counts = tick_cost.make_services(mix, 1), dict.fromkeys(tick_cost.ROLES, 1)

    def decide(tick: int) -> None:
        nonlocal counts
        snapshot = tick_cost.make_snapshot(mix, float(rng.poisson(_RATE)), dict(counts))
        decisions = decide_all({0: (services[0], snapshot, tick_cost.SPEC)}, tick_cost.START_S + tick)
        counts = {role: decisions[0].tiers[role].replicas for role in tick_cost.ROLES}

    for tick in range(_SETTLED_TICKS):
        decide(tick)
    return lambda: decide(_SETTLED_TICKS)


def one_request() -> Callable[[], object]:
    """The next request at a picker that admits at once."""
    harness = PickerHarness(service_with_slo(), pods=engine_names(2))
    harness.send()
    return lambda: picked_engine(harness.send())


def report(root: Path = ROOT) -> Iterable[str]:
    """The figures, a line each."""
    files, lines = count_code(root, _CODE)
    core_files, core_lines = count_code(root, _CORE)
    yield f"{_CODE}: {lines:,} lines in {files} files"
    yield f"{_CORE}: {core_lines:,} lines in {core_files} files"
    yield f"docs for users (without {' and '.join(_NOT_FOR_USERS)}): {count_words(root):,} words"
    left = count_private_words(root)
    uses = ", ".join(f"{word} {count}" for word, count in left.most_common())
    yield f"private words left: {len(left)} of {len(private_words(root))}, {left.total()} uses ({uses or 'none'})"
    seconds = ", ".join(f"{name} {count} s" for name, count in stage_seconds(root).items())
    yield f"seconds of the last stages: {seconds or 'none in build/log'}"
    for name, make in (("scaling decision", one_decision), ("request", one_request)):
        passed = traced_files(root, _CODE, make())
        yield f"one {name} passes {len(passed)} files: {', '.join(passed)}"


def main(_: Sequence[str]) -> int:
    for line in report():
        print(line)
    return 0
