"""minserve doctor: what this machine has for minserve, and what to do about what it lacks."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from minserve import __version__
from minserve.commands.arguments import add_json_option
from minserve.commands.cuda_findings import cuda_findings
from minserve.commands.exit_codes import FAILED
from minserve.commands.finding import Finding
from minserve.commands.output import say, size, visible, write_json

EXAMPLES = """\
Examples:
  minserve doctor
  minserve doctor --json | python -m json.tool
"""
LIBRARIES = ("numpy", "cffi", "tiktoken", "regex", "rich", "jinja2")


def add_parser(commands: Any) -> None:
    """Add `doctor` to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine",
        description="Check what this machine has for minserve. Exit code 0 if minserve can be used, else 1.",
        epilog=EXAMPLES,
    )
    add_json_option(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings and what to do; 1 if something is broken."""
    findings = examine()
    usable = all(finding.status != "broken" for finding in findings)
    if args.json:
        write_json({"usable": usable, "findings": findings})
        return 0 if usable else FAILED
    marks = {"ok": "", "missing": "  [missing]", "broken": "  [BROKEN]"}
    say("minserve doctor")  # without rich, which may be what is broken
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        say(f"  {finding.name:<{width}}  {visible(finding.value)}{marks[finding.status]}")
    advice = [f"{finding.name}: {finding.advice}" for finding in findings if finding.advice]
    say()
    if advice:
        say("What to do:" if not usable else "Usable. What would make it better:")
        for line in advice:
            say(f"  - {line}")
    else:
        say("All good.")
    return 0 if usable else FAILED


def examine() -> list[Finding]:
    """Look at everything once. Each look is on its own: one that fails is a finding, not the end."""
    findings = []
    for name, look in (
        ("minserve", _minserve),
        ("Python", _python),
        ("libraries", _libraries),
        ("NumPy", _numpy),
        ("compiler", _compiler),
        ("C core", _core),
        ("self check", _self_check),
        ("nvcc", _nvcc),
        ("NVIDIA driver", _driver),
        ("CUDA", cuda_findings),
        ("cache", _cache),
        ("models", _models),
    ):
        try:
            findings.extend(look())
        except Exception as error:  # whatever is broken here is what the user came to learn
            findings.append(Finding(name, f"{type(error).__name__}: {error}", "broken", "install minserve again"))
    return findings


def _minserve() -> list[Finding]:
    return [Finding("minserve", f"{__version__}, {Path(__file__).parent.parent}")]


def _python() -> list[Finding]:
    value = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    machine = f"{platform.system()} {platform.release()}, {platform.machine()}, {_cpus()} CPUs"
    return [Finding("Python", value), Finding("machine", machine)]


def _cpus() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _libraries() -> list[Finding]:
    from importlib.metadata import version as installed

    found, missing = [], []
    for name in LIBRARIES:
        try:
            importlib.import_module(name)
            found.append(f"{name} {installed(name)}")
        except Exception as error:  # a damaged library raises more than ImportError
            missing.append(f"{name} ({type(error).__name__}: {error})")
    if not missing:
        return [Finding("libraries", ", ".join(found))]
    names = " ".join(text.split()[0] for text in missing)
    return [Finding("libraries", f"cannot import {', '.join(missing)}", "broken", f"pip install {names}")]


def _numpy() -> list[Finding]:
    import numpy as np

    try:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        name = f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()
    except Exception:  # its form is not promised by NumPy, and old ones have none
        name = "unknown"
    return [Finding("NumPy", f"{np.__version__}, BLAS: {name}")]


def _compiler() -> list[Finding]:
    """The compiler that a build would use: $CC, or Python's own setting, or what is usual."""
    import sysconfig

    candidates = [os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"]
    for command in filter(None, candidates):
        program = shlex.split(str(command))[0]
        if shutil.which(program):
            first_line = _output([program, "--version"])
            return [Finding("compiler", f"{program}: {first_line}" if first_line else program)]
    return [
        Finding(
            "compiler",
            "none found",
            "missing",
            "install gcc or clang (Debian, Ubuntu: apt install gcc; macOS: xcode-select --install), "
            "then install minserve again to get the C core",
        )
    ]


def _output(command: list[str]) -> str | None:
    """The first line that a program prints, or None if it fails or takes more than 5 seconds."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=5, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    return lines[0].strip() if lines else None


def _core() -> list[Finding]:
    from minserve.ops import native

    reason = native.why_unavailable()
    info = native.info()
    if reason is not None:
        return [Finding("C core", "not available; NumPy computes, several times slower", "missing", reason)]
    findings = [
        Finding("C core", f"present, built by {info.get('compiler') or 'an unknown compiler'}"),
        Finding("instructions", f"{info.get('isa')} (available: {', '.join(info.get('isas') or ())})"),
    ]
    if info.get("threads"):
        return [*findings, Finding("threads", str(info.get("max_threads")))]
    advice = "the core runs on one thread: build it with a compiler that has pthread.h, or OpenMP"
    return [*findings, Finding("threads", "one: it was built without", "missing", advice)]


def _self_check() -> list[Finding]:
    """A small matrix product, in C and in NumPy, must agree."""
    import numpy as np

    from minserve.ops import load_backend, native
    from minserve.ops.dtypes import F32, Tensor

    rng = np.random.default_rng(0)
    weight = rng.standard_normal((33, 64), dtype=np.float32)  # (out, in)
    x = rng.standard_normal((3, 64), dtype=np.float32)  # (T, in)
    tensor = Tensor("self check", F32, weight.shape, weight.view(np.uint8).reshape(-1))
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    names = ["numpy"] if native.why_unavailable() is not None else ["numpy", "c"]
    for name in names:
        backend = load_backend(name)
        error = float(np.abs(backend.linear(x, backend.prepare(tensor)) - exact).max())
        if not error < 1e-4:  # float32 sums of 64 products of standard normals are good to about 1e-5
            advice = "this build computes wrongly on this machine: use --backend numpy, and report it"
            return [Finding("self check", f"{name} is off by {error:g} in a matrix product", "broken", advice)]
    return [Finding("self check", f"{' and '.join(names)} computed a matrix product as they should")]


def _nvcc() -> list[Finding]:
    """The CUDA compiler: in PATH, or where its installer puts it."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [str(Path(root) / "bin") for root in roots if root]
    path = shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(folders))
    return [Finding("nvcc", path or "not found (optional)")]


def _driver() -> list[Finding]:
    if shutil.which("nvidia-smi"):
        line = _output(["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"])
        if line:
            return [Finding("NVIDIA driver", line)]
    return [Finding("NVIDIA driver", "not found (optional)")]


def _cache() -> list[Finding]:
    from minserve.model import catalog

    folder = Path(catalog.cache_folder())
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    value = f"{folder}, {size(free)} free"
    if not _writable(existing):
        advice = f"make {existing} writable, or set MINSERVE_CACHE to a folder that is"
        nothing_here = not any(catalog.cached(name) for name, model in catalog.KNOWN.items() if not model.built_in)
        return [Finding("cache", f"{value}, not writable", "broken" if nothing_here else "missing", advice)]
    return [Finding("cache", value)]


def _writable(folder: Path) -> bool:
    """Whether a file can be made there; trying is the only sure way."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _models() -> list[Finding]:
    """Known models that are here. The default one is fetched at its first use, so none in the cache is no fault."""
    from minserve.model import catalog
    from minserve.model.cache_folder import is_offline

    lost = [name for name, model in catalog.KNOWN.items() if model.built_in and model.file() is None]
    if lost:
        return [Finding("models", f"{', '.join(lost)}: lost", "broken", "install minserve again: they are part of it")]
    built_in = ", ".join(name for name, model in catalog.KNOWN.items() if model.built_in)
    here = [name for name, model in catalog.KNOWN.items() if not model.built_in and catalog.cached(name) is not None]
    if here:
        return [Finding("models", f"{', '.join(here)}; built in: {built_in}")]
    if is_offline():
        advice = (
            "MINSERVE_OFFLINE is set, so none is fetched, and commands use the built-in tiny; unset it, then minserve "
            "models pull smollm2 fetches one; without a network: minserve models pull smollm2 --from FILE"
        )
    else:
        advice = (
            "minserve models pull smollm2 fetches one now; the first use does it as well, or takes the built-in tiny "
            "where there is no network"
        )
    return [Finding("models", f"none in the cache; built in: {built_in}", "missing", advice)]
