"""One list of operations and its implementations: reference.py (NumPy, the definition), native.py (C)."""

from minserve.ops.backend import OPERATIONS, Backend, load_backend

__all__ = ["OPERATIONS", "Backend", "load_backend"]
