"""Measurements on the local cluster. Figures of one run: machines differ, so compare within a run, not across."""
