"""The command line's options of the engine, under vLLM's names."""

from __future__ import annotations

import argparse
import re
from typing import Any

from minserve.commands.arguments import at_least
from minserve.commands.draft_arguments import add_draft_options, speculative_config

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_OPTIONS = (
    "block_size",
    "num_kv_blocks",
    "kv_cache_memory",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "scheduling_policy",
)


def memory_size(text: str) -> int:
    """An argparse type: bytes, with K, M, G or T for powers of 1024, as in 512M or 1.5GiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"must be an amount of memory such as 512M or 2G, not {text!r}")
    return size


def add_engine_options(parser: argparse.ArgumentParser, *, drafts: bool = True) -> Any:
    """--block-size, --num-kv-blocks, --max-num-seqs and the others of LLM that the engine takes; returns their group.

    None of them has a default here, so that LLM's own hold. drafts: --draft and what belongs to it, too.
    """
    group = parser.add_argument_group("engine")
    group.add_argument("--block-size", type=at_least(1), metavar="N", help="tokens in a KV block (default: 16)")
    memory = group.add_mutually_exclusive_group()
    memory.add_argument(
        "--num-kv-blocks", type=at_least(1), metavar="N", help="KV blocks (default: what fits into 512 MiB)"
    )
    memory.add_argument(
        "--kv-cache-memory", type=memory_size, metavar="BYTES", help="as many KV blocks as fit, as in 512M or 2G"
    )
    group.add_argument(
        "--max-num-seqs", type=at_least(1), metavar="N", help="most sequences that run at the same time (default: 32)"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=at_least(1), metavar="N", help="most tokens in a step (default: 512)"
    )
    _switch(group, "prefix-caching", "no-prefix-cache", "start sequences from KV blocks that others computed")
    _switch(group, "chunked-prefill", "no-chunked-prefill", "spread a long prompt over several steps")
    group.add_argument(
        "--scheduling-policy",
        choices=("fcfs", "priority"),
        help="who goes first: fcfs, first come, first served (default), or priority, the lowest number",
    )
    if drafts:
        add_draft_options(parser)
    return group


def _switch(group: Any, name: str, alias: str, what: str) -> None:
    """--enable-NAME, --no-enable-NAME, --ALIAS."""
    dest = "enable_" + name.replace("-", "_")
    one = group.add_mutually_exclusive_group()
    one.add_argument(
        f"--enable-{name}", dest=dest, action="store_const", const=True, default=None, help=f"{what} (default)"
    )
    one.add_argument(f"--no-enable-{name}", f"--{alias}", dest=dest, action="store_const", const=False, help="do not")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, as arguments of LLM. Raises ParameterError, ModelNotFoundError."""
    options = {name: value for name in _OPTIONS if (value := getattr(args, name, None)) is not None}
    speculative = speculative_config(args)
    return options if speculative is None else {**options, "speculative_config": speculative}
