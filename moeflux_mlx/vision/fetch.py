"""Fetches image files from other machines by http and https, from public addresses only.

The URL of an image may come from a stranger, for example from a page that an agent reads. So it must not lead to
anything that only this machine or its network can reach. A name is looked up once, each of its addresses is checked,
and the connection goes to one of these, so a name server cannot give another answer later (DNS rebinding). Proxies are
not used, because they would look up the name themselves.
"""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from ipaddress import IPv4Address, IPv6Network, ip_address
from queue import Empty, SimpleQueue
from string import punctuation
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from ..errors import RequestError
from ..version import VERSION
from .pixels import FILE_BYTES

REDIRECTS = 3  # the most redirects to follow
MOVED = (301, 302, 303, 307, 308)
PORTS = {"http": 80, "https": 443}
HEADERS = {"Accept": "image/*", "User-Agent": f"moeflux-mlx/{VERSION}"}
UNICAST = IPv6Network("2000::/3")  # all IPv6 addresses that are assigned on the internet (RFC 4291, section 2.4)
NAT64 = IPv6Network("64:ff9b::/96")  # the last 32 bits are an IPv4 address (RFC 6052)


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the internet, not to this machine or a private network.

    An IPv6 address that stands for an IPv4 address (mapped, 6to4, NAT64) is public if that one is.
    """
    ip = ip_address(address)
    if ip.version == 6:
        carried = IPv4Address(int(ip) % (1 << 32)) if ip in NAT64 else ip.ipv4_mapped or ip.sixtofour
        if carried is not None:
            return is_public(str(carried))
        if ip not in UNICAST:
            return False
    return ip.is_global and not ip.is_multicast


def fetch(url: str, until: float, may_connect: Callable[[str], bool] = is_public) -> bytes:
    """The file at a URL, of at most `FILE_BYTES`.

    Args:
        until: deadline on the clock `time.monotonic`.
        may_connect: whether an IP address may be connected to; asked anew for each redirect.

    Raises:
        RequestError: the file cannot be fetched, is too large, or is at an address that may not be connected to.
    """
    try:
        for _ in range(1 + REDIRECTS):
            target, data = _get(url, until, may_connect)
            if target is None:
                return data
            url = urljoin(url, target)
        raise RequestError(f"it is redirected more than {REDIRECTS} times")
    except (OSError, ValueError, HTTPException) as error:
        reason = "it took too long" if time.monotonic() >= until else str(error)[:200] or type(error).__name__
        raise RequestError(f"the image cannot be fetched: {reason}") from None


def _get(url: str, until: float, may_connect: Callable[[str], bool]) -> tuple[str | None, bytes]:
    """Where a URL is redirected to, or else None and the file."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise RequestError(f"{url[:100]!r} is not at http:// or https://")
    host, port = parts.hostname, parts.port or PORTS[parts.scheme]
    path = quote(parts.path or "/", safe=punctuation) + (f"?{quote(parts.query, safe=punctuation)}" * bool(parts.query))
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    http = HTTPSConnection(host, port, context=tls) if tls else HTTPConnection(host, port)
    with closing(http), _ended(_connected(host, port, until, may_connect), until) as connected:
        # http.client connects by name only where there is no socket yet
        http.sock = tls.wrap_socket(connected, server_hostname=host) if tls else connected
        http.request("GET", path, headers=HEADERS)
        with http.getresponse() as reply:
            if reply.status in MOVED and (target := reply.getheader("Location")):
                return target, b""
            if reply.status != 200:
                raise RequestError(f"{host} answered {reply.status}")
            data = reply.read(FILE_BYTES + 1)
    if len(data) > FILE_BYTES:
        raise RequestError(f"it has more than {FILE_BYTES} bytes")
    if time.monotonic() >= until:  # the connection may have been ended within the file
        raise TimeoutError
    return None, data


def _connected(host: str, port: int, until: float, may_connect: Callable[[str], bool]) -> socket.socket:
    """A connection to one of the addresses that a name has now, each of which is checked before."""
    addresses = _addresses(host, port, until)
    if not all(map(may_connect, addresses)):
        raise RequestError(f"{host} is not at a public address; send a data: URL")
    failed: OSError = TimeoutError()
    for number, address in enumerate(addresses):
        seconds = (until - time.monotonic()) / (len(addresses) - number)
        if seconds <= 0:
            break
        try:
            return socket.create_connection((address, port), seconds)
        except OSError as error:
            failed = error
    raise failed


def _addresses(host: str, port: int, until: float) -> list[str]:
    """The addresses of a name. A look-up cannot be ended, so at `until` its thread is left behind."""
    answers: SimpleQueue[list[Any] | Exception] = SimpleQueue()

    def look_up() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, ValueError) as error:
            answers.put(error)

    threading.Thread(target=look_up, daemon=True).start()
    try:
        answer = answers.get(timeout=max(until - time.monotonic(), 0))
    except Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return list(dict.fromkeys(str(address[0]) for *_, address in answer))


@contextmanager
def _ended(connected: socket.socket, until: float) -> Iterator[socket.socket]:
    """A context manager that closes a connection at its end, and breaks it at `until`: a socket's own timeout starts
    again with each byte.
    """
    with connected, connected.dup() as same:  # the one that TLS takes over cannot be ended from outside

        def end() -> None:
            with suppress(OSError):  # it has ended before
                same.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(until - time.monotonic(), end)
        timer.daemon = True
        timer.start()
        try:
            yield connected
        finally:
            timer.cancel()
            timer.join()
