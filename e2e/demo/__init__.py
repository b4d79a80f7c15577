"""The demo: a real trace on a real cluster, shown live, and a report from which every figure can be computed again."""

import sys
from pathlib import Path

_ENGINE_IMAGE = str(Path(__file__).resolve().parents[2] / "engine-image")
if _ENGINE_IMAGE not in sys.path:
    sys.path.append(_ENGINE_IMAGE)  # the light engine, whose core the followers drive, is a program of the engine image
