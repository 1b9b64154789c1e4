"""Measuring: a load of requests, the client that sends it, and what it saw."""
