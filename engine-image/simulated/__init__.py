"""A vLLM without a model: the same HTTP, metrics and scheduling, with steps that take the time an accelerator would.

Problem: what serves a fleet can only be tried against a fleet, and two cores hold at most two real engines.
Idea: everything that a gateway or an autoscaler can see of vLLM, computed from a measured law of the step time by one
small process. The schedule, the KV blocks, the step times and the counters are the simulator's (`plimsoll.sim.engine`),
in virtual time. `engine_core` adds requests and KV of other engines, `real_time_driver` lays it onto the clock, `api`
puts vLLM's HTTP in front of it, and `server` starts and ends it.
"""
