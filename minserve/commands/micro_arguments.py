"""The command line's options of `bench --micro`."""

from __future__ import annotations

import argparse
from typing import Any

from minserve.commands.arguments import at_least


def add_micro_options(group: Any, modes: Any) -> None:
    """--micro, of which (and of other `modes`) one may be given; --tokens, --turns."""
    modes.add_argument(
        "--micro",
        action="store_true",
        help="time each operation of the model and show it beside the machine's limits, measured in turns with it: "
        "memory read, int8 and float32 arithmetic; --plot draws the roofline",
    )
    group.add_argument(
        "--tokens",
        type=token_counts,
        metavar="N,N",
        help="with --micro: tokens in a step (default: 1,16,512); up to 32 are that many sequences that decode, more "
        "are a prompt",
    )
    group.add_argument(
        "--turns",
        type=at_least(1),
        metavar="N",
        help="with --micro, --peers or --speculative: how often each is measured (default: 15; 5; 5)",
    )


def token_counts(text: str) -> tuple[int, ...]:
    """An argparse type: whole numbers of at least 1 with commas between them."""
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"must be whole numbers of at least 1 such as 1,16,512, not {text!r}")
    return counts
