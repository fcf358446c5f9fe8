"""Only what pyproject.toml cannot say: the cffi extension modules and the wheel's ABI tag."""

import os

from setuptools import setup

BUILDERS = ["src/attnix/kernel/_core_build.py", "src/attnix/drivers/accel/cpu/_cpu_build.py"]

setup(
    # A builder that is not in the tree yet is left out, so that the rest installs.
    cffi_modules=[f"{path}:ffi" for path in BUILDERS if os.path.exists(path)],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
