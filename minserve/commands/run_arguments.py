"""The command line's options of a measurement: what else is run beside the load, and what is written."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from minserve.commands.whole_file import writable_file

NO_DRAFT = "no-draft"
# name -> what the baseline changes in the engine's options (the first two are engines that cannot speculate)
BASELINES: Mapping[str, Mapping[str, Any]] = {
    "static": {"static_batching": True, "num_speculative_tokens": 0},
    "reserve-max": {"reserve_max_model_len": True, "num_speculative_tokens": 0},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "no-chunked-prefill": {"enable_chunked_prefill": False},
    NO_DRAFT: {"num_speculative_tokens": 0},
}


def add_run_options(parser: argparse.ArgumentParser, *, drafts: bool = True) -> None:
    """--baseline, --plot, --trace, --quiet. drafts: the command has --draft."""
    group = parser.add_argument_group("what is run and shown")
    group.add_argument(
        "--baseline",
        action="append",
        choices=[name for name in BASELINES if drafts or name != NO_DRAFT],
        help="run the same load also so, and compare: static (request-level batching), reserve-max (each request "
        "holds KV blocks for max_model_len), no-prefix-cache, no-chunked-prefill"
        + (", no-draft; may be given again" if drafts else "; may be given again"),
    )
    group.add_argument("--plot", type=picture, metavar="FILE", help="draw the figures into FILE.png or FILE.html")
    group.add_argument(
        "--trace",
        type=writable_file,
        metavar="FILE.jsonl",
        help="write every event of the first run, a line of JSON each",
    )
    group.add_argument("--quiet", "-q", action="store_true", help="no progress bar")


def picture(path: str) -> str:
    """An argparse type: a file that could be written and whose name ends in .png or .html."""
    if not path.lower().endswith((".png", ".html")):
        raise argparse.ArgumentTypeError(f"a picture is FILE.png or FILE.html, not {path!r}")
    return writable_file(path)
