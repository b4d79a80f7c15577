"""The fit of a step's law finds a law that is known, through pauses, late stamps and a card that gets hot."""

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from bench.hardware import fit_step_model

LAW = {"base": 5e-3, "anypre": -1.5e-3, "pretok": 2e-5, "preattn": 1.2e-9, "dec": 1.5e-5, "ctx": 3e-8}
HOT_COEFFICIENTS = {key: value * 1.2 for key, value in LAW.items()}


def log(path: Path, count: int = 6000, hot_from: int = 6000, late: float = 0.0) -> Path:
    """A step log that follows LAW, with pauses, and end stamps that are late by up to `late` s, at the next's cost."""
    generator = np.random.default_rng(3)
    lines, now, composed = ["t_sched,t_out,npre,pretok,preattn,ndec,decctx,run,wait,kv"], 100.0, 99.99
    for number in range(count):
        npre = int(generator.random() < 0.3)
        pretok = npre * int(generator.integers(50, 8000))
        ndec = int(generator.integers(1, 256))
        context = ndec * int(generator.integers(100, 3000))
        law = HOT_COEFFICIENTS if number >= hot_from else LAW
        row = (1, npre, pretok, pretok**2 / 2, ndec, context)
        if generator.random() < 0.01:  # nobody asked for a while
            now += 1.0
            composed = now
        began, now = now, now + sum(value * part for value, part in zip(law.values(), row, strict=True))
        stamp = now + late * generator.random()
        lines.append(f"{composed:.6f},{stamp:.6f},{npre},{pretok},{pretok**2 / 2:.0f},{ndec},{context},{ndec},0,0.1")
        composed = began + 0.3 * (now - began)  # two steps in flight: composed while the one before it runs
    path.write_text("\n".join(lines) + "\n")
    return path


def fitted_laws(folder: Path) -> dict[str, dict[str, float]]:
    return {one["set"]: one["law"] for one in fit_step_model.fit(folder, folder / "steps.csv")}


def test_fit_known_law_is_recovered(tmp_path: Path) -> None:
    log(tmp_path / "steps.csv")
    assert fitted_laws(tmp_path)["pooled"] == pytest.approx(LAW, rel=1e-3)


def test_fit_late_timestamps_hardly_matter(tmp_path: Path) -> None:
    log(tmp_path / "steps.csv", late=2e-3)
    law = fitted_laws(tmp_path)["pooled"]
    for name in ("base", "pretok", "dec", "ctx"):
        assert law[name] == pytest.approx(LAW[name], rel=0.06), name


def test_fit_throttling_gpu_yields_cool_and_hot_law(tmp_path: Path) -> None:
    log(tmp_path / "steps.csv", count=8000, hot_from=4000)
    times = fit_step_model.read_steps(tmp_path / "steps.csv")["t_out"]
    (tmp_path / "clock.json").write_text(json.dumps({"wall_s": 1e9, "monotonic_s": 0.0}))
    rows = ["timestamp, index, clocks.current.sm [MHz], power.draw [W]"]
    for at_s in np.arange(times[0] - 1, times[-1] + 1):
        wall = datetime.fromtimestamp(1e9 + at_s, tz=UTC).strftime("%Y/%m/%d %H:%M:%S.%f")[:-3]
        rows.append(f"{wall}, 0, {1980 if at_s < times[4000] else 1450}, 600")
        rows.append(f"{wall}, 1, 345, 80")  # another card, which is not ours
    (tmp_path / "gpu.csv").write_text("\n".join(rows) + "\n")
    laws = fitted_laws(tmp_path)
    assert laws["cool"]["base"] == pytest.approx(LAW["base"], rel=0.02)
    assert laws["hot"]["base"] == pytest.approx(HOT_COEFFICIENTS["base"], rel=0.02)
    assert laws["hot"]["pretok"] == pytest.approx(HOT_COEFFICIENTS["pretok"], rel=0.02)


def test_fit_steps_without_successors_are_rejected(tmp_path: Path) -> None:
    rows = [f"{at}.0,{at}.1,0,0,0,1,100,1,0,0.1" for at in range(50)]
    (tmp_path / "steps.csv").write_text("t_sched,t_out,npre,pretok,preattn,ndec,decctx,run,wait,kv\n" + "\n".join(rows))
    with pytest.raises(ValueError, match="without a pause"):
        fit_step_model.fit(tmp_path, tmp_path / "steps.csv")


def test_fit_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    path = log(tmp_path / "steps.csv", count=50)
    path.write_text(path.read_text() + "123.4,12")
    assert fit_step_model.read_steps(path)["t_out"].size == 50
