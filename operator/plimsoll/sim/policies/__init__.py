"""Scaling policies of the simulated fleet: the operator's own core, peer autoscalers, and baselines."""
