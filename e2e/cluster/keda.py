"""The source of KEDA's operator and metrics server without the scalers of other products.

Problem: KEDA has about 70 scalers, each with a client library of its product, and all are built in: ten minutes of a
core, most of it for nothing here. Idea: a copy of its module keeps the external scalers only. All else is
as it was released, its lock file too.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from e2e.cluster.go_modules import downloaded
from e2e.cluster.settings import CACHE
from e2e.cluster.shell import run

MODULE = "github.com/kedacore/keda/v2@v2.21.0"
_SCALERS = Path("pkg/scalers")  # a file each
_KEPT_FILES = ("scaler.go", "external_scaler.go")
_REST = 'package scalers\n\nconst externalMetricType = "External"\n'  # what these need of a removed file
_CHOICE = Path("pkg/scaling/scalers_builder.go")  # makes a scaler by the type of its trigger
_KEPT_CASES = ('\tcase "external"', '\tcase "external-push"', "\tdefault:")
_CASES = re.compile("(?<=// TRIGGERS-START\n).*(?=\t// TRIGGERS-END)", re.DOTALL)


def source() -> Path:
    """The folder to build in. The module is downloaded if it is not there, and copied again."""
    folder = CACHE / "keda"
    shutil.rmtree(folder, ignore_errors=True)
    run("cp", "-r", "--no-preserve=mode", downloaded(MODULE), folder)  # what Go downloads is read-only
    remove_other_scalers(folder)
    return folder


def remove_other_scalers(folder: Path) -> None:
    """Leave the external scalers only in a copy of KEDA's source."""
    for path in (folder / _SCALERS).glob("*.go"):
        if path.name not in _KEPT_FILES:
            path.unlink()
    (folder / _SCALERS / "rest.go").write_text(_REST)
    choice = folder / _CHOICE
    choice.write_text(_CASES.sub(_kept, choice.read_text()))


def _kept(cases: re.Match[str]) -> str:
    switch, *rest = re.split(r"^(?=\t(?:case |default:|//))", cases[0], flags=re.MULTILINE)
    return switch + "".join(case for case in rest if case.startswith(_KEPT_CASES))
