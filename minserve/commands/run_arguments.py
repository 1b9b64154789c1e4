"""The command line's options of a measurement: what else is run beside the load, and what is written."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from minserve.commands.whole_file import writable_file

# name -> what the baseline changes in the engine's options
BASELINES: Mapping[str, Mapping[str, Any]] = {
    "static": {"static_batching": True},
    "reserve-max": {"reserve_max_model_len": True},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "no-chunked-prefill": {"enable_chunked_prefill": False},
}


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """--baseline, --plot, --trace, --quiet."""
    group = parser.add_argument_group("what is run and shown")
    group.add_argument(
        "--baseline",
        action="append",
        choices=tuple(BASELINES),
        help="run the same load also so, and compare: static (request-level batching), reserve-max (each request "
        "holds KV blocks for max_model_len), no-prefix-cache, no-chunked-prefill; may be given again",
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
