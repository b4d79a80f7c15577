"""How well requests find the engine that holds their beginning."""
