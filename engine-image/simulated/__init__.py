"""vLLM without a model: the same HTTP API, metrics and scheduling, with step times of an accelerator.

Problem: software for a fleet can only be tested with a fleet, and two cores run at most two real engines. Idea:
everything that a gateway or an autoscaler can observe of vLLM, computed from a measured step time model by one small
process. The schedule, the KV blocks, the step times and the counters are the simulator's (`plimsoll.sim.engine`), in
virtual time. `engine_core` adds requests and KV of other engines, `real_time_driver` runs it in real time, `api` serves
vLLM's HTTP API, and `server` starts and ends it.
"""
