"""`python -m attnix.drivers.accel.cuda.look`: the CUDA devices of this machine, as JSON; in a process of its own, since whoever
asks a device how much memory it has keeps some of it.
"""

from __future__ import annotations

import json
import sys

import torch


def main() -> int:
    devices = []
    if torch.cuda.is_available():
        for ordinal in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(ordinal)
            major, minor = torch.cuda.get_device_capability(ordinal)
            devices.append(
                {
                    "name": torch.cuda.get_device_name(ordinal), "free_bytes": free, "total_bytes": total,
                    "capability": 10 * major + minor,
                }
            )  # fmt: skip
    print(json.dumps({"torch": torch.__version__, "devices": devices}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
