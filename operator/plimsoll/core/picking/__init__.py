"""Which engine takes a request: endpoints, the choice among them, names, and counts of what they hold. Pure."""
