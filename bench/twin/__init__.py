"""Real vLLM with steps of a profile's length, under load; what came of it is docs/trust.md."""
