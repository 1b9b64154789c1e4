"""Helpers for tests: writers of small synthetic model files. Nothing in the package imports these."""
