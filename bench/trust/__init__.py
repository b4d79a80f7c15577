"""Validation of the simulator: against theory, models, recorded machines and published results."""
