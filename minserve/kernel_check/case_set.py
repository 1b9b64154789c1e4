"""The sizes on which kernels are checked: few, and each there for a mistake that it shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minserve.kernel_check.case import KV_TYPES, PARTITION, Case, make_case

SHAPES = ("small", "full")


def make_cases(shapes: str = "small", dtypes: tuple[str, ...] = tuple(KV_TYPES)) -> list[Case]:
    """The cases, float32 first. small: a few a dtype. full: block boundaries times GQA times head sizes as well."""
    cases = [case for dtype in dtypes for case in _small(dtype)]
    if shapes == "full":
        cases += [case for dtype in dtypes for case in _full(dtype)]
    return cases


def _small(dtype: str) -> Iterator[Case]:
    size = 16
    # Lengths around block boundaries, and a sequence without new tokens between others; 3 heads to a KV head.
    yield make_case(
        f"{dtype}, decode, lengths about a block",
        *(dtype, (1, size - 1, 40, size, size + 1, 2 * size), (1, 1, 0, 1, 1, 1)),
        **_model(6, 2, 64, size),
        seed=1,
    )
    # A chunk of a prompt beside a decode step and a prompt from its beginning.
    yield make_case(
        f"{dtype}, prefill beside decode",
        *(dtype, (37, 70, 9), (20, 1, 9)),
        **_model(3, 1, 64, size),
        seed=2,
    )
    # A context of three parts, in one pass and cut; one of a single token beside it.
    for with_partial in (False, True):
        yield make_case(
            f"{dtype}, long context{', parts' if with_partial else ''}",
            *(dtype, (2 * PARTITION + 5, 1, PARTITION), (2, 1, 1)),
            **_model(2, 1, 64, size),
            with_partial=with_partial,
            seed=3,
        )
    # 8 heads to a KV head, the larger head size, small blocks; scores so large that exp(score) is infinite.
    yield make_case(
        f"{dtype}, head size 128, large scores",
        *(dtype, (41, 7), (3, 1)),
        **_model(8, 1, 128, 8),
        loudness=40.0,
        seed=4,
    )
    # One head, a small head size, large blocks.
    yield make_case(
        f"{dtype}, head size 32, no shared KV head", *(dtype, (33, 64), (1, 2)), **_model(2, 2, 32, 32), seed=5
    )


def _full(dtype: str) -> Iterator[Case]:
    seed = 100
    for head_dim in (64, 128):
        for heads, kv_heads in ((2, 2), (9, 3), (8, 1)):
            for size in (8, 16, 32):
                lengths = (1, size - 1, size, size + 1, 2 * size, 5 * size + 3)
                sizes = _model(heads, kv_heads, head_dim, size)
                about = f"{dtype}, head size {head_dim}, {heads} over {kv_heads} heads, blocks of {size}"
                yield make_case(f"{about}, decode", dtype, lengths, (1,) * 6, **sizes, seed=seed)
                yield make_case(f"{about}, prefill", dtype, lengths, (1, 2, size, 1, size, 19), **sizes, seed=seed + 1)
                seed += 2
    for length in (PARTITION - 1, PARTITION, PARTITION + 1, 4 * PARTITION):
        for with_partial in (False, True):
            about = f"{dtype}, context {length}{', parts' if with_partial else ''}"
            sizes = _model(3, 1, 64, 16)
            yield make_case(about, dtype, (length, 3), (3, 1), **sizes, with_partial=with_partial, seed=seed)
        seed += 1  # both ways on the same numbers


def _model(heads: int, kv_heads: int, head_dim: int, block_size: int) -> dict[str, Any]:
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size}
