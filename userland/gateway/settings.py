"""What `attnix serve` may be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_BODY_BYTES: Final = 8 * 2**20
TIME_LIMIT_S: Final = 600.0
MAX_PARKED: Final = 256
PARKED_S: Final = 600.0


@dataclass(frozen=True)
class Settings:
    """
    socket          the daemon's socket; "": the usual place
    host, port      where HTTP is served
    keys            file of API keys; "": none, and then only this machine may connect
    max_body_bytes  longest request body
    time_limit_s    longest request
    max_parked      conversations whose contexts are kept between their requests, all keys together
    parked_s        for how long without a request
    origins         origins that browsers may call from (CORS); none unless told
    """

    socket: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    keys: str = ""
    max_body_bytes: int = MAX_BODY_BYTES
    time_limit_s: float = TIME_LIMIT_S
    max_parked: int = MAX_PARKED
    parked_s: float = PARKED_S
    origins: tuple[str, ...] = ()
