"""What the commands that run a model share: loading it, and whom to blame."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minserve.commands.engine_arguments import engine_options
from minserve.commands.output import note
from minserve.commands.progress import StageProgress
from minserve.errors import BackendError, MinserveError, in_words

if TYPE_CHECKING:
    from minserve.llm import LLM


def load_llm(args: argparse.Namespace, **overrides: Any) -> LLM:
    """The model that the options ask for, with its progress on stderr; pulls it on first use.

    overrides: arguments of LLM that go before the options. Says in one line if NumPy computes only
    because the C core is not there. Raises MinserveError, OSError.
    """
    from minserve.llm import LLM  # here, so that --help and option errors need not wait for it
    from minserve.ops import native

    quiet = getattr(args, "quiet", False)
    options: dict[str, Any] = {
        "backend": args.backend,
        "threads": args.threads,
        "max_model_len": args.max_model_len,
        "kv_cache_dtype": args.kv_cache_dtype,
        **engine_options(args),
        **overrides,
    }
    reason = native.why_unavailable()
    if options["backend"] is None and reason is not None and not quiet:
        note(f"note: running on NumPy, the C core is not available: {reason}")
    progress = StageProgress(Path(args.model).name, quiet=quiet)
    with progress, blame(options["backend"], "the model was loaded"):
        return LLM(args.model, progress=progress, **options)


@contextmanager
def blame(backend: object, doing: str) -> Iterator[None]:
    """Turn a fault in a backend's file, which is the user's own code, into a BackendError that names the file."""
    try:
        yield
    except (MinserveError, OSError, MemoryError):
        raise
    except Exception as error:
        if not str(backend).endswith(".py"):
            raise
        raise BackendError(f"{backend} failed while {doing}: {in_words(error)}") from error
