"""Measurements of the pure core: no cluster is needed."""
