"""Real engines on real GPUs: the launcher around vLLM, the law of a step, predictions held against what was seen."""
