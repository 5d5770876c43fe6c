"""This machine's names, addresses and network interfaces, and whether the launcher's variables fit them."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

PATIENCE = 2.0
"""Seconds that an address has to answer."""
_ADDRESS_OF = 0x8915  # SIOCGIFADDR, of Linux


@dataclass(frozen=True)
class Network:
    """What is known of it.

    Attributes:
        host: this machine's own name; own: the addresses that it resolves to, none if it does not.
        interfaces: for each interface its address (IPv4), "" if it has none.
        master: the addresses that MASTER_ADDR resolves to; none if it is not set or does not resolve.
        answers: whether somebody listens at MASTER_ADDR:MASTER_PORT; None if that was not asked.
    """

    host: str
    own: tuple[str, ...]
    interfaces: Mapping[str, str]
    master: tuple[str, ...] = ()
    answers: bool | None = None

    def interface_of(self, address: str) -> str:
        """The interface that has an address; "" if none has."""
        return next((name for name, has in self.interfaces.items() if has == address), "")

    def is_own(self, address: str) -> bool:
        """Whether a process of this machine can listen at an address."""
        return is_loopback(address) or bool(self.interface_of(address)) or ":" in address


def is_loopback(address: str) -> bool:
    """
    Example:
        >>> is_loopback("127.0.1.1"), is_loopback("10.0.0.1"), is_loopback("::1")
        (True, False, True)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def look(environment: Mapping[str, str]) -> Network:
    """Looks; asks nobody but MASTER_ADDR, and that only of a rank that does not listen there itself."""
    host = socket.gethostname()
    known = Network(host, _resolved(host), _interfaces(), _resolved(environment.get("MASTER_ADDR", "")))
    port = environment.get("MASTER_PORT", "")
    ask = known.master and environment.get("RANK", "0") != "0" and port.isdecimal()
    answers = _answers(known.master[0], int(port)) if ask else None
    return Network(known.host, known.own, known.interfaces, known.master, answers)


def _resolved(name: str) -> tuple[str, ...]:
    if not name:
        return ()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def _interfaces() -> dict[str, str]:
    return {name: _address_of(name) for _, name in socket.if_nameindex()}


def _address_of(interface: str) -> str:
    with suppress(OSError, ImportError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            found = fcntl.ioctl(asked.fileno(), _ADDRESS_OF, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    return ""


def _answers(address: str, port: int) -> bool:
    with suppress(OSError, OverflowError):
        socket.create_connection((address, port), PATIENCE).close()
        return True
    return False
