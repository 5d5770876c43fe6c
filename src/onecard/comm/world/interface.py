"""The network interface that leads to the other hosts. Gloo by itself takes that of this host's own name, which Debian gives to
loopback."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress

_ADDRESS_OF = 0x8915  # SIOCGIFADDR
_FLAGS_OF = 0x8913  # SIOCGIFFLAGS
_UP = 0x1
_FAR = "203.0.113.1"  # kept free for documentation: asked for its route, never sent to
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def named_loopback(host: str) -> bool:
    """Whether a host is written as this very one.

    Example:
        >>> named_loopback("localhost"), named_loopback("127.0.0.1"), named_loopback("node0")
        (True, True, False)
    """
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def own_address(host: str) -> str:
    """This host's address by which others reach it, if ``host`` is where they meet; "" where it cannot be told.

    A name that means loopback here (Debian's 127.0.1.1) means something else to the others: then it is the address of the way
    out, or of the only interface that there is.

    Example:
        >>> own_address("localhost")
        '127.0.0.1'
    """
    if named_loopback(host):
        return "::1" if ":" in host else "127.0.0.1"
    try:
        found = _route(socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0])
    except OSError:  # no such name, or no way there
        return ""
    if not ipaddress.ip_address(found).is_loopback:
        return found
    with suppress(OSError):
        return _route((socket.AF_INET, socket.SOCK_DGRAM, 0, "", (_FAR, 9)))
    outside = [address for address, name in addresses().items() if name != LOOPBACK]
    return outside[0] if len(outside) == 1 else ""


def towards(host: str) -> str:
    """The name of the interface that leads to where the ranks meet; "" where it cannot be told.

    Example:
        >>> towards("127.0.0.1") == LOOPBACK
        True
    """
    address = own_address(host)
    if not address or ipaddress.ip_address(address).is_loopback:
        return LOOPBACK if address else ""
    return addresses().get(address, "")


def choose() -> None:
    """Tell Gloo which interface to take, unless the user has (``GLOO_SOCKET_IFNAME``)."""
    host = os.environ.get("MASTER_ADDR", "")
    if host and "GLOO_SOCKET_IFNAME" not in os.environ and (name := towards(host)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def addresses() -> dict[str, str]:
    """The addresses of this host, with their interfaces: those that are up, one of IPv4 each; all of IPv6."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex() if sys.platform == "linux" else ():
            asked = struct.pack("256s", name[:15].encode())
            with suppress(OSError):
                (flags,) = struct.unpack("H", fcntl.ioctl(probe, _FLAGS_OF, asked)[16:18])
                if flags & _UP:
                    found[socket.inet_ntoa(fcntl.ioctl(probe, _ADDRESS_OF, asked)[20:24])] = name
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        for line in file:
            number, _, _, scope, _, name = line.split()
            if scope != "20":  # link-local addresses need their interface named
                found[str(ipaddress.ip_address(bytes.fromhex(number)))] = name
    return found


def _route(target: tuple[int, int, int, str, tuple[object, ...]]) -> str:
    """The address of this host that a datagram to a target would come from. Nothing is sent."""
    family, kind, protocol, _, address = target
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def words() -> str:
    """This host's addresses, to choose one.

    Example:
        >>> "127.0.0.1" in words()
        False
    """
    outside = [f"{address} ({name})" for address, name in addresses().items() if name != LOOPBACK]
    return f"{socket.gethostname()} has {', '.join(outside) or 'no address but loopback'}"
