"""Addresses of workers: `<name>[:<port>]`, and which of them may be listened at."""

import ipaddress
import socket
from collections.abc import Sequence

from torchtitan_rl.hosts.messages import HostError

USUAL_PORT = 26600
"""Port of a worker if none is given."""


class AddressError(HostError):
    """An address that cannot be used; the message says what to write instead."""


def split_address(text: str, *, usual: int = USUAL_PORT) -> tuple[str, int]:
    """Name and port of `<name>[:<port>]`; an IPv6 address with a port is in brackets. `usual` is
    the port if none is given.

    Example:
        >>> split_address("node7:4000"), split_address("node7"), split_address("[::1]:4000")
        (('node7', 4000), ('node7', 26600), ('::1', 4000))
    """
    name, port = text, ""
    if text.startswith("["):
        name, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        name, _, port = text.partition(":")
    if not name or (port and not (port.isdigit() and 0 <= int(port) < 65536)):
        raise AddressError(f"{text!r} is no <address> and no <address>:<port>")
    return name, int(port) if port else usual


def join_address(name: str, port: int) -> str:
    """The text of a name or address and a port.

    Example:
        >>> join_address("::1", 4000)
        '[::1]:4000'
    """
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def listening_address(text: str, *, allow_public: bool) -> tuple[str, int]:
    """IP address and port of `<address>[:<port>]` at which a worker is to listen.

    Raises AddressError for an address that the whole world may reach, unless that is allowed, and
    for one by which no other host reaches this one.

    Example:
        >>> listening_address("127.0.0.1:4000", allow_public=False)
        ('127.0.0.1', 4000)
    """
    name, port = split_address(text)
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise AddressError(
            f"the name {name!r} is not known here ({error}): give an IP address of this machine"
        ) from error
    address = _reachable(name, [str(place[0]) for *_, place in found])
    own = ipaddress.ip_address(address)
    if own.is_unspecified:
        raise AddressError(
            f"{address} is all addresses of this machine: give the one by which the other hosts "
            "reach it"
        )
    if own.is_global and not allow_public:
        raise AddressError(
            f"{address} is a public address. A worker runs whatever somebody sends who has the "
            "secret, and nothing is encrypted: give an address of a private network, or add "
            "--allow_public behind a firewall"
        )
    return address, port


def _reachable(name: str, addresses: Sequence[str]) -> str:
    """The address among those of a name by which other hosts reach this one. Many a machine knows
    its own name as an address of the loopback."""
    if name in (*addresses, "localhost"):  # that is what was asked for
        return addresses[0]
    outer = [each for each in addresses if not ipaddress.ip_address(each).is_loopback]
    if not outer:
        raise AddressError(
            f"{name!r} is {addresses[0]} here (/etc/hosts), by which no other host reaches this "
            "one: give the IP address by which they do"
        )
    return outer[0]


def family_of(address: str) -> socket.AddressFamily:
    """Kind of an IP address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
