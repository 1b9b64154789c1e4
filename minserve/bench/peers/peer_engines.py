"""The engines that can be measured: where each is, what it is told, and how one comes by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minserve.bench.peers.work import Work

MINSERVE = "minserve"
REPACKED = "Q4_0"  # a type for which llama.cpp has kernels over repacked weights, of as many bits as Q4_1's
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class EngineSpec:
    """An engine to start: name (of its rows), its file for child.py, options, and what installs it."""

    name: str
    file: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    install: str = ""


@dataclass(frozen=True)
class Peer:
    """A peer that can be asked for: its engine file, and what installs it."""

    file: Path
    install: str


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        # Not a ready-made wheel: those are compiled for processors without the wider vector units.
        "llama.cpp": Peer(
            _HERE / "llama_cpp_engine.py",
            'CMAKE_ARGS="-DGGML_NATIVE=ON" pip install --no-binary llama-cpp-python llama-cpp-python',
        ),
        "openvino": Peer(_HERE / "openvino_engine.py", "pip install openvino-genai"),
    }
)


def minserve_spec(options: Mapping[str, Any]) -> EngineSpec:
    """minserve itself; options: arguments of LLM."""
    return EngineSpec(MINSERVE, _HERE / "minserve_engine.py", options)


def peer_specs(
    names: Sequence[str], model: Path, file_type: str, threads: int, works: Sequence[Work]
) -> list[EngineSpec]:
    """The peers by their names in PEERS, in that order, each with threads threads; llama.cpp may come twice.

    file_type: what the file's matrices are stored as, such as "Q4_1". It is measured as it is, and requantized to
    REPACKED unless it is that already.
    """
    common = {"model": str(model), "threads": threads}
    specs = []
    for name in names:
        peer = PEERS[name]
        if name == "llama.cpp":
            specs.append(EngineSpec(f"llama.cpp {file_type}", peer.file, common, peer.install))
            if file_type != REPACKED:
                requantized = {**common, "requantize": REPACKED}
                specs.append(EngineSpec(f"llama.cpp {REPACKED}", peer.file, requantized, peer.install))
        else:
            shapes = [(work.num_seqs, work.prompt_len, work.seq_len) for work in works]
            specs.append(EngineSpec(name, peer.file, {**common, "shapes": shapes}, peer.install))
    return specs
