"""Demand forecast: the script that makes the jump prior, and how the forecast does on given series."""
