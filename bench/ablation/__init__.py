"""Ablation: the operator without one of its mechanisms at a time, to measure the value of each."""
