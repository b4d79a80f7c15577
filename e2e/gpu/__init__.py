"""Plimsoll on real GPUs: one Kubernetes node from plain processes, on a machine that has nothing but its GPUs."""
