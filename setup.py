"""Only what pyproject.toml cannot say: the cffi extension modules and the wheel's ABI tag."""

from pathlib import Path

from setuptools import setup

# Without liburing's headers the file tier reads and writes with threads (drivers/nvme/ring_engine.py).
have_liburing = any(Path(folder, "liburing.h").exists() for folder in ("/usr/include", "/usr/local/include"))

setup(
    cffi_modules=[
        "src/attnix/kernel/_core_build.py:ffi",
        "src/attnix/drivers/accel/cpu/_cpu_build.py:ffi",
        "src/attnix/drivers/_stored_build.py:ffi",
        *(["src/attnix/drivers/nvme/_uring_build.py:ffi"] if have_liburing else []),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
