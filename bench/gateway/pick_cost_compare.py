"""CPU time of a picker's answer in this tree against other trees: `python -m bench.gateway.pick_cost_compare TREE...`.

A TREE is a work tree of another commit (`git worktree add`). In each round, every tree measures the same requests with
its own `bench.gateway.pick_cost`, in a process of its own, one tree after the other. So they share the machine's noise.
Prints the microseconds of CPU of an answer in each tree (median of the rounds), and the median and range of the ratio
of this tree to the other within a round. With the same code, the range shows the noise.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parents[2]
ROUNDS = 4
ENDPOINTS = 32
PROMPT_BYTES = (2_000, 8_000, 100_000)
# The same bodies in each tree: text in lines, whose breaks JSON escapes.
SCRIPT = f"""
import json
from bench.gateway import pick_cost
from tests.gateway.picker_harness import service_with_slo

def body(size, number):
    content = f"{{number}} " + ("a line of text that has sixty characters and ends here, so.\\n" * size)[:size]
    messages = [{{"role": "user", "content": content}}]
    return json.dumps({{"model": "chat", "stream": True, "messages": messages}}).encode()

pick_cost._body = body
services = {{"without admission": service_with_slo(model=False), "with admission": service_with_slo(batch=50)}}
print(json.dumps({{
    f"{{size}} bytes {{name}}": pick_cost.cost(obj, size, {ENDPOINTS}, 300 if size < 50_000 else 60)[0]
    for size in {PROMPT_BYTES}
    for name, obj in services.items()
}}))
"""


def measure(tree: Path) -> dict[str, float]:
    """Microseconds of CPU of an answer in the code of a tree, by size and kind of service."""
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'operator'}:{tree}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", SCRIPT]
    found = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    return dict(json.loads(found.stdout))


def main(trees: list[Path]) -> None:
    order = (HERE, *trees)
    # The first process of a round is slower than the next ones: each round turns the order round.
    rounds = [{tree: measure(tree) for tree in order[:: 1 if n % 2 else -1]} for n in range(ROUNDS)]
    for service in rounds[0][HERE]:
        here = [one[HERE][service] for one in rounds]
        print(f"{service}: here {statistics.median(here):.1f} us")
        for tree in trees:
            there = [one[tree][service] for one in rounds]
            ratios = sorted(a / b for a, b in zip(here, there, strict=True))
            print(
                f"  {tree.name}: {statistics.median(there):.1f} us; ratio {statistics.median(ratios):.2f} "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


if __name__ == "__main__":
    main([Path(argument).resolve() for argument in sys.argv[1:]])
