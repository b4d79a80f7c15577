"""Benchmarks and evaluations. Results of one run: machines differ, so compare within a run, not across."""
