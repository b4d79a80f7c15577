"""Compare Plimsoll with other policies on the same loads, plants and seeds: `python -m bench scoreboard`.

Problem: whether a policy is better than current practice must be measured. A measurement that only its author can
repeat, on loads that its author chose, proves little.

Idea: rows are data (`rows`): a seeded load, a manifest, a machine with its start-up times, and targets. Every policy
runs the same rows with the same seeds. Plimsoll has one default configuration for all rows, each peer the best setting
that a search found (`search`). The runs of the whole board and their order are data too (`run_plan`); policies that
depend on earlier results of a row are selected during the run (`full_run`). Each run is stored under the hash of all
its inputs (`run_store`), so a board can be stopped, resumed and checked. The stored runs alone are scored (`scoring`),
checked (`target_checks`) and shown (`docs_pages`, `markdown`, `cost_chart`).

Figures are counted as in `plimsoll.sim.result`: over all offered requests, including warm-up and tail.
"""
