"""The command line's options of a measurement: what else is run beside the load, and what is written."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    group.add_argument("--trace", metavar="FILE.jsonl", help="write every event of the first run, a line of JSON each")
    group.add_argument("--quiet", "-q", action="store_true", help="no progress bar")


def picture(path: str) -> str:
    """An argparse type: a file whose name ends in .png or .html, in a folder that is there."""
    if not path.endswith((".png", ".html")):
        raise argparse.ArgumentTypeError(f"a picture is FILE.png or FILE.html, not {path!r}")
    if not Path(path).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no such folder")
    return path
