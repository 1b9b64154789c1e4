"""The working set: KV memory in fixed blocks."""
