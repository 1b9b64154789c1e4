"""The work of run.sh: compile check_main.cu with both kernels, compare with float64, measure, print one JSON line."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minserve.kernel_check.case import Case, make_case, write_cases
from minserve.kernel_check.case_set import make_cases
from minserve.kernel_check.oracle import expected

ROOT = Path(__file__).resolve().parent.parent.parent
CUDA = ROOT / "csrc" / "cuda"
KERNELS = ("paged_attention", "paged_attention_naive")
FLUSH_BYTES = 512 << 20  # several times the L2 cache of any GPU
REPEATS = 20
BLOCK = 16

# What is measured: name, batch, context, new tokens a sequence, heads, KV heads, head size, dtype.
LLAMA = (32, 8, 128)  # heads of an 8-billion-parameter Llama 3
SMOL = (9, 3, 64)  # of SmolLM2-135M
MEASURED = [
    *[(f"decode, batch {b}, context {c}", b, c, 1, *LLAMA, "float16") for b in (1, 8, 32) for c in (1024, 4096)],
    ("decode, batch 128, context 1024", 128, 1024, 1, *LLAMA, "float16"),
    ("decode, batch 32, context 1024, int8", 32, 1024, 1, *LLAMA, "int8"),
    ("decode, batch 32, context 1024, float32", 32, 1024, 1, *LLAMA, "float32"),
    ("decode, batch 32, context 1024, SmolLM2", 32, 1024, 1, *SMOL, "float16"),
    ("prefill of 2048", 1, 2048, 2048, *LLAMA, "float16"),
    ("chunk of 512 at context 4096", 1, 4096, 512, *LLAMA, "float16"),
]
MEASURED_ON_CPU = [
    ("decode, batch 2, context 64", 2, 64, 1, *SMOL, "float16"),
    ("prefill of 40", 1, 40, 40, *SMOL, "int8"),
]


def say(text: str) -> None:
    """A line for a person; the JSON comes on stdout, last."""
    print(text, file=sys.stderr)


def main() -> int:
    """0 if every result is right, 1 if one is not, 2 if nothing could be run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on-cpu", action="store_true", help="run the kernels on the CPU, on few and small shapes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            machine, programs = compile_programs(folder, args.on_cpu)
            right = {kernel: compare(programs[kernel], folder, args.on_cpu) for kernel in KERNELS}
        except (OSError, subprocess.CalledProcessError) as error:
            say(f"error: {error}")
            return 2
        document = {"machine": machine, "correctness": right}
        try:
            document |= measure(programs[KERNELS[0]], folder, args.on_cpu)
        except Exception as error:  # what is right is known already, and must not be lost with it
            say(f"error: nothing was measured: {error}")
            document["error"] = str(error)
    print(json.dumps(document))
    return 0 if all(not result["wrong"] for result in right.values()) else 1


def compile_programs(folder: Path, on_cpu: bool) -> tuple[dict[str, str], dict[str, Path]]:
    """What the programs run on, and the program of each kernel, compiled side by side."""
    if on_cpu:
        compiler = os.environ.get("CXX", "g++")
        options = ["-O2", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-I", str(CUDA / "on_cpu"), "-x", "c++"]
        machine = {"gpu": "this CPU", "compute_capability": "-", "driver": "-"}
    else:
        compiler = os.environ.get("NVCC", "nvcc")
        for tool in (compiler, "nvidia-smi"):
            if shutil.which(tool) is None:
                raise OSError(f"{tool} is not on PATH: this needs CUDA and an NVIDIA GPU (--on-cpu does without)")
        query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        machine = dict(zip(("gpu", "compute_capability", "driver"), answer.split(", "), strict=True))
        capability = machine["compute_capability"].replace(".", "")
        options = ["-O3", "-gencode", f"arch=compute_{capability},code=sm_{capability}"]
    say(f"compiling for {machine['gpu']}")
    programs = {kernel: folder / kernel for kernel in KERNELS}
    running = []
    for kernel, program in programs.items():
        define = f'-DMS_KERNEL_FILE="{kernel}.cu"'
        running.append(
            subprocess.Popen(
                [compiler, "-std=c++17", "-I", str(CUDA), define, *options, str(CUDA / "check_main.cu"), "-o", program]
            )
        )
    for process in running:
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, compiler)
    return machine, programs


def run(program: Path, cases: Sequence[Case], folder: Path, *options: object) -> tuple[list[dict[str, Any]], list]:
    """What the program says of each case, and its result float32 (T, H, d). Raises OSError if it fails half-way."""
    write_cases(folder / "cases", cases)
    command = [program, folder / "cases", folder / "out", *map(str, options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    lines = [line for line in lines if "code" in line]
    if done.returncode or len(lines) != len(cases):
        last = lines[-1]["message"] if lines else "nothing was run"
        raise OSError(f"{program.name} ended with {done.returncode} after {len(lines)} of {len(cases)} cases: {last}")
    flat, results = np.fromfile(folder / "out", np.float32), []
    for case in cases:
        results.append(flat[: case.q.size].reshape(case.q.shape))
        flat = flat[case.q.size :]
    return lines, results


def compare(program: Path, folder: Path, on_cpu: bool) -> dict[str, Any]:
    """Every case of the set, and contexts up to 4,096: how many are wrong, and the largest part of what is allowed."""
    cases = make_cases("small" if on_cpu else "full")
    for dtype in ("float32", "float16", "int8") if not on_cpu else ():
        for with_partial in (False, True):
            lengths, new = (4096, 4095, 1, 1025), (1, 1, 1, 2)
            sizes = {"heads": 24, "kv_heads": 3, "head_dim": 128, "block_size": BLOCK}
            name = f"{dtype}, 4096{', parts' if with_partial else ''}"
            cases.append(make_case(name, dtype, lengths, new, **sizes, with_partial=with_partial, seed=7))
    lines, results = run(program, cases, folder)
    wrong, worst, refused = [], 0.0, 0
    for case, line, result in zip(cases, lines, results, strict=True):
        if line["code"] == 1:  # cudaErrorInvalidValue: sizes that the kernel does not take
            refused += 1
            continue
        exact, tolerance = expected(case)
        part = np.max(np.abs(result - exact) / tolerance[..., None], initial=0.0)
        worst = max(worst, float(part)) if part == part else float("nan")
        if line["code"] or not part <= 1:
            wrong.append(case.name)
    # A context in one pass and cut into parts: the same bits.
    outputs = {case.name: result for case, result in zip(cases, results, strict=True)}
    for name in [name for name in outputs if name.endswith(", parts")]:
        whole = outputs.get(name.removesuffix(", parts"))
        if whole is not None and whole.tobytes() != outputs[name].tobytes():
            wrong.append(f"{name}: not the bits of one pass")
    say(f"{program.name}: {len(cases) - refused} cases, {len(wrong)} wrong, at most {worst:.3f} of what is allowed")
    return {"cases": len(cases) - refused, "refused": refused, "wrong": wrong, "largest_part_of_tolerance": worst}


def large_case(name: str, batch: int, context: int, new: int, heads: int, kv_heads: int, d: int, dtype: str) -> Case:
    """A case of many bytes, made fast: the same few blocks of numbers again and again, in blocks without order."""
    random = np.random.default_rng(0)
    blocks = -(-context // BLOCK)
    shape = (batch * blocks, kv_heads, BLOCK, d)
    some = random.standard_normal((16, *shape[1:]), np.float32)
    stored = np.rint(some * 30).clip(-127, 127).astype(np.int8) if dtype == "int8" else some.astype(dtype)
    values = np.resize(stored, shape)
    scale = np.full(shape[:3], 1 / 30, np.float32) if dtype == "int8" else None
    return Case(
        name=name,
        q=random.standard_normal((batch * new, heads, d), np.float32),
        k=values,
        v=values,
        k_scale=scale,
        v_scale=scale,
        block_tables=random.permutation(batch * blocks).astype(np.int32).reshape(batch, blocks),
        context_lens=np.full(batch, context, np.int32),
        query_start_loc=np.arange(batch + 1, dtype=np.int32) * new,
        scale=d**-0.5,
        with_partial=(batch * new * heads // kv_heads // 16 + batch) * kv_heads < 4 * 128,  # as use_parts decides
    )


def measure(program: Path, folder: Path, on_cpu: bool) -> dict[str, Any]:
    """Medians over launches, each after other memory was written; bytes: keys and values once, q and out."""
    rows, copy_rate = [], 0.0
    flush, repeats = (1 << 20, 2) if on_cpu else (FLUSH_BYTES, REPEATS)
    for name, batch, context, new, heads, kv_heads, d, dtype in MEASURED_ON_CPU if on_cpu else MEASURED:
        case = large_case(name, batch, context, new, heads, kv_heads, d, dtype)
        line = run(program, [case], folder, repeats, flush)[0][0]
        scales = 0 if case.k_scale is None else 2 * case.k_scale.nbytes
        nbytes = case.k.nbytes + case.v.nbytes + scales + 2 * case.q.nbytes
        products = 4 * heads * d * sum(context - new + i + 1 for i in range(new)) * batch
        row = {"name": name, "milliseconds": statistics.median(line["milliseconds"]), "bytes": nbytes}
        row["gb_per_second"] = nbytes / row["milliseconds"] / 1e6
        row["tflop_per_second"] = products / row["milliseconds"] / 1e9
        copy_rate = max(copy_rate, 2 * flush / statistics.median(line["copy_milliseconds"]) / 1e6)
        if not on_cpu and dtype != "int8":
            row["torch_milliseconds"] = torch_attention(batch, context, new, heads, kv_heads, d, dtype)
        rows.append(row)
        torch = row.get("torch_milliseconds")
        beside = "" if torch is None else f"; PyTorch {torch:.3f} ms"
        rate = f"{row['gb_per_second']:.0f} GB/s of {copy_rate:.0f} by a copy"
        say(f"{name}: {row['milliseconds']:.3f} ms, {rate}{beside}")
    return {"copy_gb_per_second": copy_rate, "measured": rows}


def torch_attention(batch: int, context: int, new: int, heads: int, kv_heads: int, d: int, dtype: str) -> float | None:
    """Milliseconds of PyTorch's attention on as much, in one piece and not in blocks; None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available() or not hasattr(torch.nn.functional, "scaled_dot_product_attention"):
        return None
    from torch.nn.functional import scaled_dot_product_attention

    kind = {"float16": torch.float16, "float32": torch.float32}[dtype]
    q = torch.randn(batch, heads, new, d, device="cuda", dtype=kind)
    k, v = (torch.randn(batch, kv_heads, context, d, device="cuda", dtype=kind) for _ in range(2))
    mask = None
    if new > 1 and new < context:
        mask = torch.ones(new, context, dtype=torch.bool, device="cuda").tril(context - new)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for i in range(REPEATS + 1):
        flush.fill_(i)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=new == context > 1, enable_gqa=True)
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after))
    return statistics.median(times[1:])


if __name__ == "__main__":
    sys.exit(main())
