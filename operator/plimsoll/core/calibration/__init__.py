"""What running engines say about their own speed: windows of counters, the posterior that they feed, its stored form.

window -> update -> belief -> answer; state keeps a belief over a restart.
"""
