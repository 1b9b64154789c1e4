"""Speculative sampling: draft cheaply, verify exactly."""
