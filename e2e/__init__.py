"""Scenarios on a real cluster, the tools they share, and the demo."""
