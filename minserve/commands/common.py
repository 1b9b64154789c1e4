"""What the commands that run a model share: loading it, and whom to blame."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from minserve.commands.engine_arguments import engine_options
from minserve.commands.output import note
from minserve.commands.progress import StageProgress
from minserve.errors import BackendError, DownloadError, MinserveError, in_words

if TYPE_CHECKING:
    from minserve.llm import LLM

DEFAULT_MODEL = "smollm2"
FALLBACK_MODEL = "tiny"  # built in
Loaded = TypeVar("Loaded")


def load_chosen(args: argparse.Namespace, load: Callable[[str], Loaded]) -> Loaded:
    """load(the model that --model names). Without that option, the default model; if it is not here and cannot be
    fetched, the built-in one, with a warning on stderr that not even --quiet holds back.

    Sets args.model to what was loaded, so that a command that loads twice tries and warns once. Raises what load
    raises.
    """
    if args.model is not None:
        return load(args.model)
    args.model = DEFAULT_MODEL
    try:
        return load(args.model)
    except DownloadError as error:
        note(
            f"warning: {DEFAULT_MODEL} is not here and could not be fetched, so the built-in model {FALLBACK_MODEL} is "
            f"used instead, which is far smaller and knows little; fetch {DEFAULT_MODEL} with: minserve models pull "
            f"{DEFAULT_MODEL}. What happened: {error}"
        )
    args.model = FALLBACK_MODEL
    return load(args.model)


def load_llm(args: argparse.Namespace, *, draft_for: Callable[[str], str] | None = None, **overrides: Any) -> LLM:
    """The model that the options ask for (see load_chosen), with its progress on stderr; pulls it on first use.

    draft_for(model): who guesses for the model that is loaded, which is put in place of --draft; it is asked again for
    the model that is used instead. overrides: arguments of LLM that go before the options. Says in one line if NumPy
    computes only because the C core is not there. Raises MinserveError, OSError.
    """
    from minserve.llm import LLM  # here, so that --help and option errors need not wait for it
    from minserve.ops import native

    quiet = getattr(args, "quiet", False)
    backend = overrides.pop("backend", args.backend)
    reason = native.why_unavailable()
    if backend is None and reason is not None and not quiet:
        note(f"note: running on NumPy, the C core is not available: {reason}")

    def load(model: str) -> LLM:
        if draft_for is not None:
            args.draft = draft_for(model)
        options: dict[str, Any] = {
            "backend": backend,
            "threads": args.threads,
            "max_model_len": args.max_model_len,
            "kv_cache_dtype": args.kv_cache_dtype,
            **engine_options(args),
            **overrides,
        }
        progress = StageProgress(Path(model).name, quiet=quiet)
        with progress, blame(backend, "the model was loaded"):
            return LLM(model, progress=progress, **options)

    return load_chosen(args, load)


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
