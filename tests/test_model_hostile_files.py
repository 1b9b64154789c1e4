"""Model files that other engines crashed on: each is refused by name, at once, and in little memory.

Sources: ggml-org/ggml#1516 and huggingface/huggingface.js#2028 (a GGUF file of a few hundred bytes
declares gigantic strings, arrays or counts, or nests arrays 200,000 deep); antirez/h3.c#48,
leejet/stable-diffusion.cpp#1754, safetensors/safetensors#668 and run-ai/runai-model-streamer#121
(safetensors headers that overlap, leave holes, run backwards, or do not fit their data).
"""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from minserve.errors import MinserveError
from minserve.model.gguf import GGUFFile
from minserve.model.safetensors_file import SafetensorsFile

from .support.model_writers import gguf_string

BAD = Path(__file__).parent / "data" / "bad"

GGUF = {
    "arr_huge": "the array 'tokenizer.ggml.tokens' says it holds 2305843009213693952 strings",
    "bigendian": "is a big-endian GGUF file (version 3)",
    "empty": "is not a GGUF file: it is empty",
    "html": "is not a GGUF file: it begins with b'<!DOCTYPE",
    "nkv_huge": "says it holds 1152921504606846976 keys",
    "ntensors_huge": "says it holds 1152921504606846976 tensors",
    "strlen_huge": "the name of key 0 needs 4611686018427387904 bytes",
    "type_unknown": "the value of 'a' has type number 99",
    "v99": "is GGUF version 99; minserve reads versions 2 and 3",
    "arr_nested": "'a' is an array of arrays",
}
SAFETENSORS = {
    "st_dtype": "a has the unknown type 'F99'",
    "st_dup": "'a' comes twice",
    "st_hdr_1g": "its header should be 1000000000 bytes long",
    "st_hdr_huge": "its header should be 9223372036854775807 bytes long",
    "st_hole": "b begins after a hole",
    "st_list": "its header must be a JSON object, not list",
    "st_neg": "a: its data_offsets must be [begin, end], not [-8, 0]",
    "st_overlap": "b lies on top of the tensor before it",
    "st_reversed": "a: its data_offsets must be [begin, end], not [8, 0]",
    "st_shape": "a: F32 of shape [3] takes 12 bytes, but its data has 8",
    "st_short": "a reaches past the end of the file",
    "st_trailing": "56 bytes follow the last tensor, a,",
    "st_wrap": "a has the impossible shape [8589934592, 2147483648]",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stored files, and one that is large and easily made: arrays nested 200,000 deep."""
    folder = tmp_path_factory.mktemp("bad")
    for path in BAD.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    nested = struct.pack("<IQ", 9, 1) * 200_000
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("a") + struct.pack("<I", 9)
    (folder / "arr_nested.gguf").write_bytes(head + nested)
    return folder


def test_the_tables_are_complete(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {f"{n}.gguf" for n in GGUF} | {
        f"{n}.safetensors" for n in SAFETENSORS
    }


@pytest.mark.parametrize("name", [f"{n}.gguf" for n in GGUF] + [f"{n}.safetensors" for n in SAFETENSORS])
def test_refused_by_name(folder: Path, name: str) -> None:
    stem, _, kind = name.partition(".")
    reader, message = (GGUFFile, GGUF[stem]) if kind == "gguf" else (SafetensorsFile, SAFETENSORS[stem])
    start = time.perf_counter()
    with pytest.raises(MinserveError) as caught:
        reader(folder / name)
    assert time.perf_counter() - start < 1
    assert message in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits there")
def test_in_little_memory(folder: Path) -> None:
    """All of them together, in a process that may take 50 MB of address space more than it has after importing."""
    resource = pytest.importorskip("resource")
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc to know how much address space is in use")
    assert resource
    program = """
        import pathlib, resource, sys
        from minserve.errors import MinserveError
        from minserve.model.gguf import GGUFFile
        from minserve.model.safetensors_file import SafetensorsFile
        status = pathlib.Path("/proc/self/status").read_text()
        used = int(status.split("VmSize:")[1].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (used + 50 * 2**20,) * 2)
        for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
            try:
                (GGUFFile if path.suffix == ".gguf" else SafetensorsFile)(path)
            except MinserveError as error:
                print(type(error).__name__, path.name)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(folder)], capture_output=True, text=True, timeout=60
    )
    assert result.stderr == ""
    assert len(result.stdout.splitlines()) == len(GGUF) + len(SAFETENSORS)
