"""HTTP GET from this machine only: a name is never looked up, a redirect never followed, a proxy never asked."""

from __future__ import annotations

import asyncio
import ipaddress
from typing import Final
from urllib.parse import SplitResult, quote, urlsplit

from .tool import Tool, ToolError

TIME_LIMIT_S: Final = 10.0
SIZE_LIMIT_BYTES: Final = 16_384

_SAFE: Final = "/%:@!$&'()*+,;=~-._?"


def http_get(*, time_limit_s: float = TIME_LIMIT_S, size_limit_bytes: int = SIZE_LIMIT_BYTES) -> Tool:
    """The tool that reads from servers on this machine."""

    async def run(url: str) -> str:
        return await get(url, time_limit_s, size_limit_bytes)

    return Tool(
        "http_get", "Reads a page from a server on this machine, such as http://localhost:8000/status.",
        {"url": "http:// and localhost, 127.x.x.x or [::1]"}, run, ("url",), time_limit_s=time_limit_s + 1,
    )  # fmt: skip


async def get(url: str, time_limit_s: float, size_limit_bytes: int) -> str:
    """The body of the answer as text, cut at the limit; a line with the status before it when that is not 200.

    Error: ToolError for another machine, another scheme, no server, too slow an answer, or none that is HTTP.
    """
    parts, host, port = _checked(url)
    try:
        async with asyncio.timeout(time_limit_s):
            data, cut = await _exchange(host, port, _request(parts), size_limit_bytes)
    except TimeoutError:
        raise ToolError(f"{url} did not answer whole within {time_limit_s:g} s") from None
    except OSError as error:
        raise ToolError(f"{url} cannot be reached: {error.strerror or error}") from None
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    protocol, _, status = lines[0].partition(" ")
    if not protocol.startswith("HTTP/"):
        raise ToolError(f"{url} did not answer in HTTP")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if "chunked" in fields.get("transfer-encoding", "").lower():
        body = _unchunked(body)
    text = body.decode(errors="replace") + (f"\n[cut after {size_limit_bytes} bytes]" if cut else "")
    if status.split(" ")[0] == "200":
        return text
    where = f", Location: {fields['location']}" if "location" in fields else ""
    return f"[status {status}{where}]\n{text}"


def _checked(url: str) -> tuple[SplitResult, str, int]:
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname or "", parts.port or 80
    except ValueError as error:
        raise ToolError(f"{url!r} is no URL: {error}") from None
    if parts.scheme != "http":
        raise ToolError(f"{url!r}: only http:// is read")
    if host == "localhost":
        return parts, "127.0.0.1", port
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        address = None
    if address is None or not address.is_loopback:
        raise ToolError(f"{host!r} is not this machine: only localhost, 127.x.x.x and [::1] are read")
    return parts, str(address), port


def _request(parts: SplitResult) -> bytes:
    target = quote(parts.path or "/", safe=_SAFE) + (f"?{quote(parts.query, safe=_SAFE)}" if parts.query else "")
    host = parts.netloc.rpartition("@")[2]
    return (
        f"GET {target} HTTP/1.0\r\nHost: {quote(host, safe=':[]')}\r\nAccept: */*\r\nConnection: close\r\n\r\n".encode()
    )


async def _exchange(host: str, port: int, request: bytes, limit: int) -> tuple[bytes, bool]:
    """The answer up to `limit` bytes of body, and whether there was more."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        data = b""
        while piece := await reader.read(65_536):
            data += piece
            head = data.find(b"\r\n\r\n")
            if head < 0 and len(data) > limit:
                return data[:limit], True
            if head >= 0 and len(data) > head + 4 + limit:
                return data[: head + 4 + limit], True
        return data, False
    finally:
        writer.close()


def _unchunked(body: bytes) -> bytes:
    """The chunks together, as far as they came; answers to HTTP/1.0 should have none."""
    whole = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        try:
            length = int(size.split(b";")[0], 16)
        except ValueError:
            break
        if length <= 0:
            break
        whole += rest[:length]
        body = rest[length + 2 :]
    return whole
