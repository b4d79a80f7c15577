"""What can size the tiers of a simulated fleet: the operator's own core, peers' autoscalers, and yardsticks."""
