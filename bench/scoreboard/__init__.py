"""Plimsoll's law beside other policies, on the same loads, plants and seeds: `python -m bench scoreboard`.

Problem: whether a law is better than what people run today is a question of measurement, and a measurement that only
its author can repeat, on loads that its author chose, proves little.

Idea: rows are data (`rows.py`): a seeded load, a manifest, a machine and its start-up times, and the figures to be
reached. Every policy meets the same rows with the same seeds; Plimsoll has one default configuration for all of them,
each peer the best setting that a search found (`search.py`). What one run of the whole board plays, and in which order,
is data too (`plan.py`); rivals that depend on a row are chosen as it goes (`whole.py`). A run is kept under the hash of
all that it depends on, so that a board can be stopped, resumed and checked. What it all came to is judged (`judge.py`,
`reach.py`), gathered (`report.py`) and shown (`page.py`, `table.py`, `picture.py`) from the kept runs alone.

Counted as `plimsoll.sim.result` says: over everything that was offered, warm-up and tail included.
"""
