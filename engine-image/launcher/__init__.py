"""Programs next to vLLM in an engine pod: the launcher (PID 1) and the ASGI middleware inside vLLM's server."""
