#!/bin/sh
# The differential tests with the C core, and the tests of stored frames with theirs, built under AddressSanitizer and
# UndefinedBehaviorSanitizer.
# The sanitized module lives in a directory of its own, so the one in the tree stays as it is.  Called by `make asan`.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -rL src "$work/src"
rm -f "$work"/src/attnix/kernel/_core.*so "$work"/src/attnix/drivers/_stored.*so
cat > "$work/setup.py" <<'SETUP'
from setuptools import setup

setup(
    name="attnix-asan",
    package_dir={"": "src"},
    cffi_modules=["src/attnix/kernel/_core_build.py:ffi", "src/attnix/drivers/_stored_build.py:ffi"],
)
SETUP
(
    py=$(realpath -s "$python")
    cd "$work"
    ATTNIX_SANITIZE=1 "$py" setup.py --quiet build_ext --inplace
)
runtimes="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
# CPython never frees some of what it allocates, so leaks are not looked for here.
export LD_PRELOAD="$runtimes" ASAN_OPTIONS=detect_leaks=0:abort_on_error=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONMALLOC=malloc PYTHONPATH="$work/src"
export ATTNIX_EXAMPLES="${ATTNIX_EXAMPLES:-40}"
"$python" - "$work" <<'CHECK'
import sys

import attnix.drivers._stored
import attnix.kernel._core

for module in (attnix.kernel._core, attnix.drivers._stored):
    if not module.__file__.startswith(sys.argv[1]) or b"__asan_init" not in open(module.__file__, "rb").read():
        sys.exit(f"asan.sh: {module.__file__} is not the sanitized module")
CHECK
"$python" -m pytest -q tests/diff tests/conformance/test_stored.py --ignore tests/diff/test_core_memory.py "$@" # that one limits address space, which ASan needs
