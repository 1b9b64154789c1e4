#!/usr/bin/env bash
# Runs the tests of the C core, and of the CUDA kernels on this CPU, with AddressSanitizer and
# UndefinedBehaviorSanitizer: the first report ends the run with a nonzero exit. Builds into a temporary copy, and
# leaves the checkout's own libraries as they are.
#
#     tests/sanitize.sh [python]        (python: the one with minserve's dependencies; default: python3)
set -euo pipefail
python=$(command -v "${1:-python3}")
[[ $python == /* ]] || python=$PWD/$python   # the tests run in another folder
root=$(cd "$(dirname "$0")/.." && pwd)
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT

cp -r "$root"/{csrc,minserve,tests,setup.py,pyproject.toml,MANIFEST.in,README.md,LICENSE} "$copy"
rm -f "$copy"/minserve/*.so
cd "$copy"

# -fno-wrapv and -UNDEBUG undo what Python's own build flags switch off; no inlining across checks at -O1.
sanitize="-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all"
export MINSERVE_CFLAGS="$sanitize -fno-omit-frame-pointer -fno-wrapv -UNDEBUG -O1 -g1"
MINSERVE_REQUIRE_CORE=1 "$python" setup.py -q build_ext --inplace

# Python itself is not instrumented, so the sanitizer's library must be there before it; it keeps memory
# at exit, which is no leak of ours. pytest -s: captured output would swallow the report of a crash.
compiler=${CC:-gcc}
export LD_PRELOAD="$($compiler -print-file-name=libasan.so) $($compiler -print-file-name=libstdc++.so)"
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:abort_on_error=0:exitcode=99 UBSAN_OPTIONS=print_stacktrace=1
export MINSERVE_REQUIRE_CORE=1 PYTHONDONTWRITEBYTECODE=1 PYTHONMALLOC=malloc
"$python" -m pytest -q -s -p no:cacheprovider tests/test_native_linear.py tests/test_native_operations.py \
    tests/test_native_attention.py tests/test_native_sampling.py tests/test_native_probabilities.py \
    tests/test_native_arguments.py tests/test_native_backend.py tests/test_native_team.py \
    tests/test_native_forward.py tests/test_native_limits.py tests/test_cuda_on_cpu.py tests/test_cuda_device_array.py
echo "sanitize: no reports"
