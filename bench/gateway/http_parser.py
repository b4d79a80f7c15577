"""CPU time of the picker's HTTP parser in this tree against other trees: `python -m bench.gateway.http_parser TREE...`.

A TREE is a work tree of another commit (`git worktree add`), such as one with another parser. In each round every tree
parses the same questions of Envoy, in the pieces of a socket, in a process of its own, in turns, so that they share the
machine's noise; the least of several batches counts. Prints the microseconds of CPU of a question in each tree (median
of the rounds), and the median and range of the ratio of this tree to the other within a round.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parents[2]
ROUNDS: Final = 7
BODY_BYTES: Final = (0, 1_000, 8_000, 100_000)  # 0: the head alone
SCRIPT: Final = f"""
import json, time
from plimsoll.gateway.http1 import HttpParser

HEAD = (
    "POST /check/v1/chat/completions HTTP/1.1\\r\\nhost: picker\\r\\ncontent-type: application/json\\r\\n"
    "x-request-id: 5f6ed3c1-4d2e-4b6a-9a35-6b1f0a9c8d17\\r\\nx-stainless-retry-count: 0\\r\\n"
    "authorization: Bearer plim_0123456789abcdef0123456789abcdef\\r\\nx-forwarded-for: 10.1.2.3\\r\\n"
    "x-envoy-expected-rq-timeout-ms: 2000\\r\\ncontent-length: {{}}\\r\\n\\r\\n"
)
PIECE = 64 << 10  # that one read of a socket gives
BATCH = 200

def microseconds(size):
    whole, parser = HEAD.format(size).encode() + b"x" * size, HttpParser(8 << 20)
    pieces = [whole[start : start + PIECE] for start in range(0, len(whole), PIECE)]
    least_s = float("inf")
    for _ in range(40):
        started = time.process_time()
        for _ in range(BATCH):
            for piece in pieces:
                parser.feed(piece)
            assert parser.next() is not None
        least_s = min(least_s, time.process_time() - started)
    return 1e6 * least_s / BATCH

print(json.dumps({{size: microseconds(size) for size in {BODY_BYTES}}}))
"""


def measure(tree: Path) -> dict[str, float]:
    """Microseconds of CPU of a question in the code of a tree, by bytes of its body."""
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'operator'}:{tree}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", SCRIPT]
    found = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    return dict(json.loads(found.stdout))


def main(trees: list[Path]) -> None:
    order = (HERE, *trees)
    rounds = [{tree: measure(tree) for tree in order[:: 1 if n % 2 else -1]} for n in range(ROUNDS)]
    for size in map(str, BODY_BYTES):
        here = [one[HERE][size] for one in rounds]
        print(f"{size} bytes of body: here {statistics.median(here):.1f} us")
        for tree in trees:
            there = [one[tree][size] for one in rounds]
            ratios = sorted(a / b for a, b in zip(here, there, strict=True))
            print(
                f"  {tree.name}: {statistics.median(there):.1f} us; ratio {statistics.median(ratios):.2f} "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


if __name__ == "__main__":
    main([Path(argument).resolve() for argument in sys.argv[1:]])
