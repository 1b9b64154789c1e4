"""Builds the C core (minserve/_core); everything else about the package is in pyproject.toml.

Without a working compiler the package still installs and runs on NumPy. Environment variables:
    MINSERVE_REQUIRE_CORE=1   a core that cannot be built is an error
    MINSERVE_THREADS=0        build it for one thread; posix or openmp: with these threads (default: what there is)
    MINSERVE_CFLAGS="..."     added to the compiler's and the linker's arguments
"""

import os
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

REQUIRED = os.environ.get("MINSERVE_REQUIRE_CORE") == "1"
MSVC = sys.platform == "win32" and "GCC" not in sys.version
# -ffp-contract=off: a product and a sum are fused only where the source says so, or results would
# differ between instruction sets. (MSVC does not fuse unless asked to.) -g0: Python's own -g would make
# the file eight times as large.
FLAGS = ["/O2", "/Zc:preprocessor"] if MSVC else ["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-g0"]
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


def notice(text):
    print(f"minserve: {text}", file=sys.stderr)


class BuildCore(build_ext):
    def run(self):
        # setuptools builds elsewhere first and copies later; while it builds, inplace is off.
        self.into_sources = self.inplace or getattr(self, "editable_mode", False)
        super().run()

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

    def compile_in_parallel(self, sources, **arguments):
        """What compiler.compile does, one file a processor."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = pool.map(lambda source: self.compile_some([source], **arguments), sources)
            return [name for names in objects for name in names]

    def remove_old_core(self, ext):
        """A core from other sources must not answer in the place of one that did not build."""
        folders = {Path(self.get_ext_fullpath(ext.name)).parent}
        if self.into_sources:
            folders.add(Path(__file__).parent / "minserve")
        for folder in folders:
            for old in [*folder.glob("_core.*.so"), *folder.glob("_core.so"), *folder.glob("_core*.pyd")]:
                old.unlink()

    def build_extension(self, ext):
        extra = os.environ.get("MINSERVE_CFLAGS", "").split()
        wanted = os.environ.get("MINSERVE_THREADS")
        if wanted not in (None, "0", *THREADS):
            raise SystemExit(f"MINSERVE_THREADS is {wanted!r}; it may be 0 or one of {', '.join(THREADS)}")
        candidates = [how for name, how in THREADS.items() if wanted in (None, name)]
        threads = next(((how[0], how[1]) for how in candidates if self.links(FLAGS + how[0], *how[1:])), None)
        ext.extra_compile_args += FLAGS + extra + (threads[0] if threads else [])
        ext.extra_link_args += extra + (threads[1] if threads else [])
        # setuptools builds again when a source is newer; other flags or another compiler must do the same.
        compiler = getattr(self.compiler, "compiler_so", None)  # MSVC has none
        flags, stamp = repr((compiler, ext.extra_compile_args, ext.extra_link_args)), Path(self.build_temp, "flags.txt")
        if not stamp.is_file() or stamp.read_text("utf-8") != flags:
            self.force = True
        self.compile_some, self.compiler.compile = self.compiler.compile, self.compile_in_parallel
        try:
            super().build_extension(ext)
        except Exception as error:
            self.remove_old_core(ext)
            if REQUIRED:
                raise
            ext.optional = True  # so that setuptools does not look for the file later on
            notice(f"no C core ({type(error).__name__}: is there a C compiler?); it will run on NumPy, slower")
            return
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.write_text(flags, "utf-8")
        if not threads:
            notice("the C core was built without threads: it will use one")


# One abi3 wheel serves CPython 3.10 and later; free-threaded builds have no stable ABI yet.
abi3 = {} if sysconfig.get_config_var("Py_GIL_DISABLED") else {"bdist_wheel": {"py_limited_api": "cp310"}}
setup(cffi_modules=["csrc/build_ffi.py:core"], cmdclass={"build_ext": BuildCore}, options=abi3)
