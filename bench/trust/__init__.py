"""Whether the simulator may be believed: against theory, laws, recorded machines and others' published figures."""
