"""The system calls: what programs may ask of the kernel, and how they ask.

Programs import from here (`attnix.connect` is `syscalls.connect`); the daemon's half is in `attnix.syscalls.daemon`.
"""

from .aclient import AsyncClient, AsyncContext, AsyncProcess, AsyncStream, aconnect
from .client import Client, Context, Pending, Process, Stream, connect
from .exceptions import AttnixError, ConnectionLost, SyscallError
from .paths import default_socket_path

__all__ = [
    "AsyncClient",
    "AsyncContext",
    "AsyncProcess",
    "AsyncStream",
    "AttnixError",
    "Client",
    "ConnectionLost",
    "Context",
    "Pending",
    "Process",
    "Stream",
    "SyscallError",
    "aconnect",
    "connect",
    "default_socket_path",
]
