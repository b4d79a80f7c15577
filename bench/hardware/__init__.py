"""Real engines on real GPUs: the launcher around vLLM, the step time model, and predictions compared
with measurements.
"""
