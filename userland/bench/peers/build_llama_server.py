"""Build llama.cpp's own server from the sources in llama-cpp-python's sdist: `python build_llama_server.py`, in the peers' venv.

There is no binary of it in the registries that `make` uses; the sdist vendors the whole of llama.cpp, so that the server is of
the same commit as the library beside it.  Compiled for this machine, as that library is; ten minutes on two cores.  The result
is `llama-server` beside the interpreter; it appears whole or not at all.  Error: the failed command's status.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

OFF = (
    "LLAMA_OPENSSL",
    "LLAMA_BUILD_TESTS",
    "LLAMA_BUILD_EXAMPLES",
    "LLAMA_BUILD_APP",
    "LLAMA_BUILD_UI",
    "LLAMA_USE_PREBUILT_UI",
)


def main() -> None:
    target = Path(sys.executable).with_name("llama-server")
    if target.exists():
        return
    jobs = str(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory(prefix="llama-server-") as scratch:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        package = f"llama-cpp-python=={version('llama-cpp-python')}"
        subprocess.run([*pip, "download", "--no-deps", "--no-binary", ":all:", "--dest", scratch, package], check=True)
        with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as sources:
            sources.extractall(scratch, filter="data")
        source = next(Path(scratch).glob("*/vendor/llama.cpp"))
        build = Path(scratch, "build")
        flags = [
            "-DCMAKE_BUILD_TYPE=Release",
            "-DBUILD_SHARED_LIBS=OFF",
            "-DGGML_NATIVE=ON",
            *(f"-D{name}=OFF" for name in OFF),
        ]
        cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
        subprocess.run([cmake, "-S", str(source), "-B", str(build), *flags], check=True, stdout=subprocess.DEVNULL)
        command = [cmake, "--build", str(build), "--target", "llama-server", "--parallel", jobs]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        partial = target.with_suffix(".partial")
        shutil.copy(build / "bin" / "llama-server", partial)
        partial.rename(target)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
