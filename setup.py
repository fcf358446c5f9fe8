"""Only what pyproject.toml cannot say: the cffi extension modules and the wheel's ABI tag."""

from setuptools import setup

setup(
    cffi_modules=[
        "src/attnix/kernel/_core_build.py:ffi",
        "src/attnix/drivers/accel/cpu/_cpu_build.py:ffi",
        "src/attnix/drivers/_stored_build.py:ffi",
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
