"""Real vLLM under load with simulated step times. Results: docs/evaluation/simulator-validation.md."""
