"""The simulated engine core: vLLM's continuous batching, KV blocks, step times and counters, in virtual time.

Two programs run this code: the simulator, and the engine simulator of `engine-image`, which runs it in real time behind
vLLM's HTTP API. Its image copies this package, which therefore needs only the standard library and the hardware
profiles.
"""
