"""Run every kernel once, with small tensors: `python -m attnix.kernels_gpu.exercise`.

What compute-sanitizer watches in `make gpu`: under it a kernel takes a hundred times as long, so the tests are too much.
On a device the cases are those that aot.py compiles for its architecture; without one, in Triton's interpreter, a few.
"""

from __future__ import annotations

import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels' modules are imported

from .aot_cases import Case, cases, run
from .launch import architecture_of


def chosen(device: torch.device) -> list[Case]:
    mine = [case for case in cases(every=False) if case.architecture == architecture_of(device)]
    if device.type == "cuda":
        return mine
    return [
        case for case in mine if (case.head_dim or 64, case.kv_dtype or "bfloat16") == (64, "bfloat16")
    ]  # it is slow


def main() -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_device(device)
    for case in chosen(device):
        run(case)
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"{case.kernel} {case.title}: ran", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
