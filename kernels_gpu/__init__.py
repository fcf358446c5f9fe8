"""Triton kernels of the accel driver on CUDA, and their plain-torch references.

Reading order: `shapes.py` (what every kernel is given), `reference.py` (what each must compute), `paged_decode.py` and
`paged_prefill.py` (attention over the page table; `attend.py` is the loop that both share), `matmul.py` (products that do
not depend on the batch).  docs/kernels.md has the algorithms, their sources and what they must move.

Importing this package needs neither triton nor a device.  A kernel that is called without triton raises RuntimeError
and says what is missing.
"""

import os

# Triton 3.9 warns unless this is set.  Off: a product and a sum are two roundings unless a kernel asks for `tl.fma`, so
# that two kernels that must agree to the bit do not depend on what the compiler fuses in each.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "0")
