"""Lower precision, and the evaluation that it must pass."""
