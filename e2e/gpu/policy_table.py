"""Rows of the page: the same load under each policy that scaled, with what was simulated before:

python -m e2e.gpu.policy_table e2e/gpu/data/DATA/results.json e2e/gpu/data/PREDICTIONS.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from e2e.gpu.scenarios import SCENARIOS

_NAMES: Final = {
    "plimsoll": "Plimsoll",
    "hpa-concurrency": "HPA on concurrency",
    "keda-ttft": "KEDA's SLO law",
}
HEAD: Final = (
    "| scenario | who scales | within the SLO, of offered | of admitted | TTFT p95 | TPOT p95 | GPU-seconds "
    "| statuses |\n"
    "|---|---|---|---|---|---|---|---|"
)


def rows(results: Mapping[str, Any], predicted: Mapping[str, Any]) -> Iterator[str]:
    """A row of each scenario that was run and predicted. Raises ValueError if its trace is not the predicted one."""
    for name, result in results.items():
        scenario, before = SCENARIOS[name], predicted.get(name)
        if before is None or not result.get("figures"):
            continue
        if before["trace_sha256"] != result["trace_sha256"]:
            raise ValueError(f"{name}: another trace was predicted")
        figures, said = result["figures"]["all"], before["policies"][scenario.policy]
        admitted = sum(phase["complete"] for phase in result["late"])
        policy, _, option = scenario.policy.partition(":")
        cells = (
            f"`{name}`",
            _NAMES[policy] + (", with the gate" if option else ""),
            f"{_percent(figures['share'])}, predicted {_percent(said['attainment_offered'])}",
            _percent(figures["within"] / admitted) if admitted else "none",
            _ms(figures["ttft_p95"]),
            _ms(figures["tpot_p95"]),
            f"{result['gpu_s']:.0f}, predicted {3600 * said['gpu_hours']:.0f}",
            ", ".join(f"{count:,} × {status}" for status, count in figures["statuses"].items()),
        )
        yield f"| {' | '.join(cells)} |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _ms(seconds: float | None) -> str:
    return "none" if seconds is None else f"{1000 * seconds:,.0f} ms"


if __name__ == "__main__":
    print(HEAD, *rows(*(json.loads(Path(path).read_text()) for path in sys.argv[1:3])), sep="\n")
