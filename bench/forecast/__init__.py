"""Demand forecast: the script that generates the growth prior, and the forecast's accuracy on given series."""
