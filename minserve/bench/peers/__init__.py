"""Measuring beside others: the same work by minserve and by other CPU engines, each in a process of its own."""
