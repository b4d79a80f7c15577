"""An engine about its load line, window by window: how runs are counted, and what was seen on the GPU."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from bench.hardware import summarise, traces
from bench.hardware.admission import windowed_slo
from bench.hardware.admission.runs import RequestOutcome
from bench.hardware.summary import ObservedRequest
from plimsoll.core.slo import Slo

SLO = Slo(0.95, ttft_s=1.0, tpot_s=0.05)
DATA = Path(windowed_slo.__file__).parents[1] / "data"
FOLDERS = [DATA / name for name in ("8b-windows", "8b-windows-b", "8b-windows-c")]


def outcome(at_s: float, *, refused: bool = False, ttft_s: float = 0.2) -> RequestOutcome:
    return RequestOutcome(
        ObservedRequest(at_s, 10, None if refused else ttft_s, None if refused else 0.01, None, not refused), refused
    )


def test_windows_have_500_requests_in_send_order() -> None:
    """Of 1,200 after the warm-up the first window has 50 refused, the second 25 late; 200 are left over."""
    early = [outcome(windowed_slo.WARM_S - 1, refused=True) for _ in range(7)]
    counted = [
        outcome(windowed_slo.WARM_S + at, refused=at < 50, ttft_s=2.0 if 500 <= at < 525 else 0.2) for at in range(1200)
    ]
    found = windowed_slo.window_figures([*reversed(counted), *early], SLO)
    assert (found["sent"], found["windows"]) == (1200, [0.9, 0.95])
    assert (found["shed"], found["in_promise"]) == (pytest.approx(50 / 1200), pytest.approx(1125 / 1200))


def all_windows(folders: Sequence[Path]) -> list[str]:
    return windowed_slo.windows_of_all_engines(
        (run for folder in folders for run in summarise.read(folder)["windows"]), SLO
    )


def test_measured_windows_meet_slo_at_capacity_not_far_beyond() -> None:
    assert all_windows(FOLDERS) == [
        "gate@1: 8 of 8 windows kept, the worst 96.2%",
        "gate@1.15: 7 of 8 windows kept, the worst 92.8%",
        "gate@1.3: 0 of 10 windows kept, the worst 84.6%",
    ]


def test_bursty_arrivals_capacity_holds_and_poisson_one_fails() -> None:
    folders = [DATA / "8b-bunched", DATA / "8b-bunched-b"]
    document = [json.loads((folder / "prediction.json").read_text()) for folder in folders]
    assert all(row["gap_cv2"] == 4.0 and row["poisson_line_rps"] > 1.4 * row["line_rps"] for row in document)
    assert all_windows(folders) == [
        "gate@1: 5 of 5 windows kept, the worst 97.4%",
        "gate@1.43: 3 of 8 windows kept, the worst 90.6%",
    ]


def test_bursty_trace_has_requested_gap_variance_and_count() -> None:
    found = np.array([request.at_s for request in traces.gamma_arrivals(50.0, 200.0, 4.0, 1)])
    gaps = np.diff(found)
    assert found.size == 10_000
    assert 0.0 <= found[0] <= found[-1] <= 200.0
    assert (gaps.std() / gaps.mean()) ** 2 == pytest.approx(4.0, rel=0.1)
    with pytest.raises(ValueError, match="gap_cv2"):
        traces.gamma_arrivals(1.0, 1.0, 0.0, 1)


def test_windows_requests_of_another_trace_are_rejected(tmp_path: Path) -> None:
    said = tmp_path / "said"
    said.mkdir()
    (said / "prediction.json").write_text((FOLDERS[0] / "prediction.json").read_text())
    (said / "run100.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0.5,10,10\n")
    (said / "a00.gate.100.requests.json").write_text('{"codes": [0], "requests": []}')
    with pytest.raises(ValueError, match="not the trace"):
        windowed_slo.table([(said, said)])
