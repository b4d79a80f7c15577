"""How often requests reach an engine that caches their prefix."""
