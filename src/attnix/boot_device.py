"""What `attnix boot` says about compute devices: `--device`, and `--hbm` where frames lie in a device's own memory.

    --device auto|cpu|cuda|cuda-dry    auto: cuda where this machine has it, else cpu; ATTNIX_DEVICE sets the default
    --hbm 40GiB | 90%                  on cuda also a share of what the weights leave free

The daemon never touches a device itself: a process of its own looks (drivers/accel/cuda/look.py), and the frames' number
is fixed here, so that every life of a driver has the same.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Final, Literal, NamedTuple, cast

from attnix.boot_tiers import parse_bytes
from attnix.drivers.accel.config import ELEMENT_BYTES, ModelConfig, weight_scalars

Device = Literal["cpu", "cuda", "cuda-dry"]
DEVICES: Final = ("auto", "cpu", "cuda", "cuda-dry")
DEVICE_VARIABLE: Final = "ATTNIX_DEVICE"
DEFAULT_BYTES: Final = 256 << 20
DEFAULT_SHARE: Final = 0.9
WORKING_BYTES: Final = 2 << 30  # of a device, for its context, products of a pass, and graphs
STUB_BYTES: Final = 4096  # of an arena whose frames lie in a device's own memory
_LOOK_S: Final = 120.0
_NODES: Final = (
    "/dev/nvidiactl",
    "/dev/dxg",
    "/dev/nvhost-gpu",
)  # without any of them there is no CUDA: no need to ask torch


class HbmSize(NamedTuple):
    """n_bytes, or share of what is free; both 0: the default of the device."""

    n_bytes: int = 0
    share: float = 0.0


class Found(NamedTuple):
    """One CUDA device."""

    name: str
    free_bytes: int
    total_bytes: int
    capability: int


def parse_hbm(text: str) -> HbmSize:
    """`256MiB`, `90%`, or nothing.  Error: ValueError."""
    if not text:
        return HbmSize()
    share = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if share is None:
        size_bytes = parse_bytes(text)
        if not size_bytes:
            raise ValueError(f"{text!r} is not a size of hbm: contexts need some")
        return HbmSize(size_bytes)
    if not 0 < float(share[1]) <= 100:
        raise ValueError(f"{text!r}: a share is more than 0% and at most 100%")
    return HbmSize(share=float(share[1]) / 100)


def look() -> tuple[str, list[Found]]:
    """(torch's version, the CUDA devices).  Error: ValueError when torch cannot be asked."""
    command = [sys.executable, "-m", "attnix.drivers.accel.cuda.look"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_S, check=True).stdout
        answer = json.loads(said)
        return str(answer["torch"]), [Found(**device) for device in answer["devices"]]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        detail = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        raise ValueError(f"torch cannot be asked for CUDA devices: {detail[-1] if detail else error}") from error


def choose(wanted: str, accels: int) -> tuple[Device, list[Found]]:
    """The device of every accel, and what there is of it.  Error: ValueError: asked for and missing."""
    if wanted in ("cpu", "cuda-dry"):
        return cast(Device, wanted), []
    if wanted == "auto" and not any(map(os.path.exists, _NODES)):
        return "cpu", []
    version, found = look()
    if wanted == "auto" and len(found) < accels:
        return "cpu", []
    if len(found) < accels:
        built = "" if "+cpu" not in version else " (a build without CUDA)"
        raise ValueError(
            f"--device cuda: {accels} accels need as many CUDA devices, and torch {version}{built} sees {len(found)}; "
            f"--device cpu computes on the CPU"
        )
    return "cuda", found[:accels]


def hbm_bytes(size: HbmSize, device: Device, found: list[Found], config: ModelConfig | None, dtype: str) -> int:
    """Bytes of frames per accel, the same for all.  Error: ValueError."""
    if device != "cuda" or config is None:
        if size.share:
            raise ValueError("--hbm as a share goes with --device cuda: a CPU's frames are a number of bytes")
        return size.n_bytes or DEFAULT_BYTES
    if size.n_bytes:
        return size.n_bytes
    weights = weight_scalars(config) * ELEMENT_BYTES[dtype]
    free = min(one.free_bytes for one in found) - weights - WORKING_BYTES
    if free <= 0:
        raise ValueError(
            f"the weights need {weights} bytes and a pass about {WORKING_BYTES}; {found[0].name} has "
            f"{min(one.free_bytes for one in found)} free"
        )
    return int((size.share or DEFAULT_SHARE) * free)
