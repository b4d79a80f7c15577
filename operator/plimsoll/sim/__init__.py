"""Simulation of a fleet in virtual time: the real core decides, and a plant that it does not know responds."""
