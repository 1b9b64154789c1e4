"""The command line's options of speculation: who guesses, and how much."""

from __future__ import annotations

import argparse
from typing import Any

from minserve.commands.arguments import at_least
from minserve.errors import ModelNotFoundError, ParameterError, did_you_mean

NGRAM = "ngram"
# dests; those of LLM's speculative_config have its names
DRAFT_OPTIONS = frozenset({"draft", "num_speculative_tokens", "prompt_lookup_max", "always_draft"})


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """--draft, --draft-tokens, --prompt-lookup-max, --always-draft. None of them has a default of its own."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--draft",
        metavar="NAME|PATH|ngram",
        help="guess tokens ahead and verify them in one step: by a smaller model of the same vocabulary, or (ngram) by "
        "what followed the last tokens when they occurred before; changes the speed and no answer's distribution",
    )
    group.add_argument(
        "--draft-tokens",
        dest="num_speculative_tokens",
        type=at_least(1),
        metavar="K",
        help="guesses a sequence and step, up to 64 (default: 4)",
    )
    group.add_argument(
        "--prompt-lookup-max",
        type=at_least(1),
        metavar="N",
        help="with --draft ngram: look for up to N last tokens, the longest match first (default: 4)",
    )
    group.add_argument(
        "--always-draft",
        action="store_true",
        help="guess in every step, also where measurement says that it makes answers slower",
    )


def speculative_config(args: argparse.Namespace) -> dict[str, Any] | None:
    """The options as LLM's speculative_config; None without --draft.

    Raises ParameterError for options that contradict each other, ModelNotFoundError for a draft that does not exist.
    """
    draft = getattr(args, "draft", None)
    if draft is None:
        for dest, option in (
            ("num_speculative_tokens", "--draft-tokens"),
            ("prompt_lookup_max", "--prompt-lookup-max"),
            ("always_draft", "--always-draft"),
        ):
            if getattr(args, dest, None):
                raise ParameterError(f"{option} has no effect without --draft; give --draft ngram, or a model to guess")
        return None
    options: dict[str, Any] = {"method": NGRAM} if draft == NGRAM else {"method": "draft_model", "model": draft}
    options["adaptive"] = not args.always_draft
    if args.num_speculative_tokens is not None:
        options["num_speculative_tokens"] = args.num_speculative_tokens
    if args.prompt_lookup_max is not None:
        if draft != NGRAM:
            raise ParameterError(
                "--prompt-lookup-max has no effect without --draft ngram: a draft model looks up nothing"
            )
        options["prompt_lookup_max"] = args.prompt_lookup_max
    _check(options)
    return options


def _check(options: dict[str, Any]) -> None:
    """Tell mistakes before a model is loaded, in the words of the command line."""
    from minserve.engine.speculative.config import SpeculativeConfig  # here, so that --help need not wait for it
    from minserve.model import catalog

    try:
        SpeculativeConfig.of(options)
    except ParameterError as error:
        raise ParameterError(str(error).removeprefix("speculative_config: ")) from None
    draft = options.get("model")
    if draft is None or draft in catalog.KNOWN:
        return
    try:
        catalog.resolve(draft)
    except ModelNotFoundError:
        close = did_you_mean(draft.lower(), [NGRAM, *catalog.KNOWN])
        raise ModelNotFoundError(
            f"--draft: {draft!r} is neither {NGRAM} nor a known model nor a file or folder{close}; known models: "
            f"{', '.join(catalog.KNOWN)}"
        ) from None
