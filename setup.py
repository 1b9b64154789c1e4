"""Builds what is compiled: the C core (minserve/_core) and the CUDA library, for a CPU and for a GPU.

The rest of the package is in pyproject.toml. Without a working compiler it still installs, and runs on NumPy.
Environment variables:
    MINSERVE_REQUIRE_CORE=1   a core, or a library for --backend cuda-on-cpu, that cannot be built is an error
    MINSERVE_THREADS=0        a core for one thread; posix or openmp: with these threads (default: what there is)
    MINSERVE_CFLAGS="..."     added to the compilers' and the linkers' arguments
    MINSERVE_CUDA=1           build the library for --backend cuda, too, with NVCC (default: the nvcc in PATH)
    MINSERVE_CUDA_ARCHS="90"  for these GPUs alone, by compute capability, and later ones (default: all since 7.5)
"""

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
CUDA_SOURCES = ROOT / "csrc" / "cuda"
REQUIRED = os.environ.get("MINSERVE_REQUIRE_CORE") == "1"
MSVC = sys.platform == "win32" and "GCC" not in sys.version
EXTRA_FLAGS = os.environ.get("MINSERVE_CFLAGS", "").split()
# How to have threads (csrc/team.c): compiler arguments, linker arguments, and a program that needs them.
THREADS = {
    "posix": (
        ["-pthread", "-DMS_THREADS=1"],
        ["-pthread"],
        # what team.c uses: MinGW has pthread.h and lacks some of it
        "#define _POSIX_C_SOURCE 200809L\n#include <pthread.h>\n#include <sched.h>\n#include <signal.h>\n"
        "#include <stdatomic.h>\n#include <stdlib.h>\n#include <unistd.h>\n"
        "int main(void) { sigset_t all; atomic_int one = 1; sigfillset(&all); free(aligned_alloc(64, 64));\n"
        "return !atomic_load(&one) || pthread_sigmask(SIG_SETMASK, &all, 0) || sched_yield() || getpid() < 0; }\n",
    ),
    "openmp": (
        ["/openmp" if MSVC else "-fopenmp"],
        [] if MSVC else ["-fopenmp"],
        "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n",
    ),
}
if MSVC:
    del THREADS["posix"]


@dataclass
class Library:
    """How one extension module is compiled, and what to say where it is not."""

    flags: list
    without: str
    threads: dict = field(default_factory=dict)  # ways to have them, as in THREADS
    is_possible: bool = True


LIBRARIES = {
    # -ffp-contract=off: a product and a sum are fused only where the source says so, or results would
    # differ between instruction sets. (MSVC does not fuse unless asked to.) -g0: Python's own -g would make
    # the file eight times as large.
    "minserve._core": Library(
        ["/O2", "/Zc:preprocessor"] if MSVC else ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-g0"],
        "no C core ({error}: is there a C compiler?); it will run on NumPy, slower",
        threads=THREADS,
    ),
    # -g: a debugger shows a kernel's own lines. MSVC lacks what on_cpu/ is written with.
    "minserve._cuda_on_cpu": Library(
        ["-std=c++17", "-O2", "-fno-strict-aliasing", "-fvisibility=hidden", "-Wno-unknown-pragmas", "-g"],
        "no backend cuda-on-cpu ({error}: is there a C++ compiler?); nothing else needs it",
        is_possible=not MSVC,
    ),
}


def notice(text):
    print(f"minserve: {text}", file=sys.stderr)


class BuildLibraries(build_ext):
    def run(self):
        # setuptools builds elsewhere first and copies later; while it builds, inplace is off.
        self.into_sources = self.inplace or getattr(self, "editable_mode", False)
        super().run()
        package = ROOT / "minserve" if self.into_sources else Path(self.build_lib, "minserve")
        build_for_gpu(package / "libminserve_cuda.so")

    def links(self, compile_args, link_args, program):
        """Can this compiler build and link a program with these arguments?"""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "probe.c")
            source.write_text(program, "ascii")
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=compile_args)
                self.compiler.link_executable(objects, str(Path(folder, "probe")), extra_postargs=link_args)
            except Exception:  # whatever it is, these arguments do not work
                return False
            return True

    def threads_of(self, library):
        """Compiler and linker arguments for the first way to have threads that works here; None: there is none."""
        wanted = os.environ.get("MINSERVE_THREADS")
        if wanted not in (None, "0", *THREADS):
            raise SystemExit(f"MINSERVE_THREADS is {wanted!r}; it may be 0 or one of {', '.join(THREADS)}")
        candidates = [how for name, how in library.threads.items() if wanted in (None, name)]
        return next(((how[0], how[1]) for how in candidates if self.links(library.flags + how[0], *how[1:])), None)

    def goes_without(self, ext, reason):
        """Go on, and say so: setuptools is not to look for the file later on."""
        ext.optional = True
        notice(LIBRARIES[ext.name].without.format(error=reason))

    def remove_old(self, ext):
        """A library from other sources must not answer in the place of one that did not build."""
        folders = {Path(self.get_ext_fullpath(ext.name)).parent}
        if self.into_sources:
            folders.add(ROOT / "minserve")
        name = ext.name.split(".")[-1]
        for folder in folders:
            for old in [*folder.glob(f"{name}.*.so"), *folder.glob(f"{name}.so"), *folder.glob(f"{name}*.pyd")]:
                old.unlink()

    def build_extension(self, ext):
        library = LIBRARIES[ext.name]
        if not library.is_possible:
            return self.goes_without(ext, "not with this compiler")
        threads = self.threads_of(library)
        ext.extra_compile_args += library.flags + EXTRA_FLAGS + (threads[0] if threads else [])
        ext.extra_link_args += EXTRA_FLAGS + (threads[1] if threads else [])
        # setuptools builds again when a source is newer; other flags or another compiler must do the same.
        compilers = [getattr(self.compiler, name, None) for name in ("compiler_so", "compiler_so_cxx")]  # MSVC has none
        flags = repr((compilers, ext.extra_compile_args, ext.extra_link_args))
        stamp = Path(self.build_temp, f"{ext.name}.flags.txt")
        force, compile_some = self.force, self.compiler.compile
        self.force = force or not stamp.is_file() or stamp.read_text("utf-8") != flags

        def compile_in_parallel(sources, **arguments):
            """What compiler.compile does, one file a processor."""
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                objects = pool.map(lambda source: compile_some([source], **arguments), sources)
                return [name for names in objects for name in names]

        self.compiler.compile = compile_in_parallel
        try:
            super().build_extension(ext)
        except Exception as error:
            self.remove_old(ext)
            if REQUIRED:
                raise
            return self.goes_without(ext, type(error).__name__)
        finally:
            self.force, self.compiler.compile = force, compile_some
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(flags, "utf-8")
        if library.threads and not threads:
            notice("the C core was built without threads: it will use one")


def digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


def with_included(source):
    """The bytes of a file, and of those in its folder that it includes."""
    text = source.read_bytes()
    yield text
    for name in re.findall(rb'^#include "(.+)"', text, re.MULTILINE):
        yield from with_included(source.parent / name.decode())


def build_for_gpu(target):
    """The CUDA library for NVIDIA GPUs, by nvcc, if MINSERVE_CUDA asks for it."""
    made_of = f"sources_{digest(b''.join(with_included(CUDA_SOURCES / 'minserve_cuda.cu')))}"
    if os.environ.get("MINSERVE_CUDA") != "1":
        # built for any GPUs by any nvcc, but from these sources
        if target.is_file() and made_of.encode() not in target.read_bytes():
            target.unlink()
            notice(f"{target.name} was of other sources and is gone; MINSERVE_CUDA=1 builds it again")
        return
    if sys.platform != "linux":
        raise SystemExit(f"MINSERVE_CUDA=1 builds a library for Linux, and this is {sys.platform}")
    nvcc = shutil.which(os.environ.get("NVCC") or "nvcc")
    if nvcc is None:
        raise SystemExit("MINSERVE_CUDA=1 needs nvcc, CUDA's compiler: put it in PATH, or say where it is with NVCC=")
    archs = os.environ.get("MINSERVE_CUDA_ARCHS", "75 80 86 89 90").replace(",", " ").split()
    if not archs or not all(arch.isdigit() for arch in archs):
        raise SystemExit('MINSERVE_CUDA_ARCHS must be compute capabilities, as in "75 90"')
    flags = ["-shared", "-std=c++17", "-O3", "-cudart", "static", "--threads", "2"]
    flags += ["-Xcompiler", "-fPIC,-fvisibility=hidden"]
    for arch in archs:
        flags += ["-gencode", f"arch=compute_{arch},code=sm_{arch}"]
    flags += ["-gencode", f"arch=compute_{archs[-1]},code=compute_{archs[-1]}"]  # PTX, for GPUs to come
    try:
        version = subprocess.run([nvcc, "--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"MINSERVE_CUDA=1 needs nvcc, and {nvcc} does not run: {error}") from None
    # The library says what it is made of (ms_cuda_compiler), so that it need not be made again: it takes a minute.
    build = f"{made_of}_flags_{digest(version + repr(flags).encode())}"
    if target.is_file() and build.encode() in target.read_bytes():
        return
    target.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder, target.name)
        arguments = [*flags, f"-DMS_BUILD={build}", "-o", str(made), str(CUDA_SOURCES / "minserve_cuda.cu")]
        print(shlex.join([nvcc, *arguments]))
        if subprocess.run([nvcc, *arguments]).returncode:
            raise SystemExit("MINSERVE_CUDA=1: nvcc could not build the CUDA library; what it says is above")
        made.replace(target)


class BuildPackage(build_py):
    def run(self):
        super().run()
        if not getattr(self, "editable_mode", False):  # an installed package compiles kernels too: minserve cuda-check
            copy = Path(self.build_lib, "minserve", "csrc_cuda")
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(CUDA_SOURCES, copy)


# One abi3 wheel serves CPython 3.10 and later; free-threaded builds have no stable ABI yet.
abi3 = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp310"}}
setup(
    cffi_modules=["csrc/build_ffi.py:core", "csrc/build_ffi.py:cuda_on_cpu"],
    cmdclass={"build_ext": BuildLibraries, "build_py": BuildPackage},
    options=abi3,
)
