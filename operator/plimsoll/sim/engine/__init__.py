"""The simulated engine core: vLLM's continuous batching, KV blocks, step times and counters, in virtual time.

Two programs run this one code: the simulator, and the engine simulator of `engine-image`, which lays it onto the clock
behind vLLM's HTTP. Its image copies this package, which therefore needs the standard library and the hardware profiles
alone.
"""
