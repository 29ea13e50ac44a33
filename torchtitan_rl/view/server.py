"""HTTP server of the page: its static files, JSON that the viewer makes, and changes of notes.

Rollouts are untrusted, and so is every other page in the same browser. A Content-Security-Policy
forbids inline scripts. Requests must name this machine as their host: else a page of a foreign name
that resolves to this machine could read everything. Paths of a request never reach the disk.

A change must come from the page itself (`why_refused`), and from this machine: there is no
password.
"""

import errno
import http.server
import ipaddress
import mimetypes
import re
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from email.message import Message
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from torchtitan_rl.view.lines import parse
from torchtitan_rl.view.query import BadRequest
from torchtitan_rl.view.viewer import NotFound, to_json

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
Endpoint = Callable[[Mapping[str, str]], dict[str, Any]]
MAX_BODY = 200_000  # bytes of a request


def host_is_ours(header: str | None, host: str) -> bool:
    """Whether a request's Host header names this machine.

    An address does. A name does only if it is localhost, `host` or this machine's own name: any
    other name may be someone's DNS entry that points here.

    Example:
        >>> host_is_ours("localhost:8765", ""), host_is_ours("evil.example:8765", "")
        (True, False)
    """
    try:
        name = urlsplit(f"//{header or ''}").hostname or ""
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    if name in (host.lower(), socket.gethostname().lower()) and name:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def why_refused(headers: Message | Mapping[str, str], client: str) -> str:
    """Why a request must not change anything; empty: it may.

    A page of another site can send a form or plain text here, but not with our own address as its
    origin, and not as JSON: for that the browser asks first, and nobody answers.

    Example:
        >>> ours = {"Host": "localhost:1", "Content-Type": "application/json"}
        >>> why_refused({**ours, "Origin": "http://localhost:1"}, "127.0.0.1")
        ''
        >>> why_refused({**ours, "Origin": "https://evil.example"}, "127.0.0.1")
        'this request is not from the page'
    """
    if headers.get("Origin") != f"http://{headers.get('Host')}":
        return "this request is not from the page"
    if headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
        return "this request is not from the page"
    if headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
        return "this request is no JSON"
    if not from_this_machine(client):
        return "notes can be changed only on the machine that serves this page"
    return ""


def from_this_machine(client: str) -> bool:
    """Whether a client's address is this machine's own.

    Example:
        >>> from_this_machine("127.0.0.1"), from_this_machine("::ffff:127.0.0.1")
        (True, True)
        >>> from_this_machine("10.1.2.3")
        False
    """
    address = ipaddress.ip_address(client.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def static_files(folder: Path = STATIC) -> dict[str, Path]:
    """Static files of the page, by their path in the URL."""
    files = {
        "/" + path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file()
    }
    return {"/": folder / "index.html", **files}


class Handler(http.server.BaseHTTPRequestHandler):
    """Handler of the page's requests: GET reads, POST changes."""

    protocol_version = "HTTP/1.1"
    # Header and body are sent together, at once.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: "Server"

    def do_GET(self) -> None:
        if not host_is_ours(self.headers.get("Host"), self.server.host):
            return self._error(HTTPStatus.FORBIDDEN, "this name is not one of this machine")
        url = urlsplit(self.path)
        if url.path.startswith("/api/"):
            endpoint = self.server.endpoints.get(url.path.removeprefix("/api/"))
            return self._call(endpoint, dict(parse_qsl(url.query, keep_blank_values=True)))
        path = self.server.files.get(url.path)
        if path is None:
            return self._error(HTTPStatus.NOT_FOUND, "there is no such page")
        kind = mimetypes.guess_type(path.name)[0] or "text/plain"
        kind = "text/javascript" if path.suffix == ".js" else kind
        self._send(HTTPStatus.OK, f"{kind}; charset=utf-8", path.read_bytes())

    def do_POST(self) -> None:
        # A body that is not read whole would be taken for the next request.
        self.close_connection = True
        # Read first: closing on unread bytes can lose the response.
        body = self._body()
        if not host_is_ours(self.headers.get("Host"), self.server.host):
            return self._error(HTTPStatus.FORBIDDEN, "this name is not one of this machine")
        if reason := why_refused(self.headers, str(self.client_address[0])):
            return self._error(HTTPStatus.FORBIDDEN, reason)
        values = parse(body)
        if values is None or not all(isinstance(value, str) for value in values.values()):
            return self._error(HTTPStatus.BAD_REQUEST, "the request is no JSON object of texts")
        change = self.server.changes.get(urlsplit(self.path).path.removeprefix("/api/"))
        self._call(change, values)

    def _body(self) -> bytes:
        """The body of a request; empty if it has no length or is too long."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"\d{1,9}", length, re.ASCII) or int(length) > MAX_BODY:
            return b""
        return self.rfile.read(int(length))

    def _call(self, endpoint: Endpoint | None, values: dict[str, str]) -> None:
        if endpoint is None:
            return self._error(HTTPStatus.NOT_FOUND, "there is nothing of this name to request")
        try:
            body = to_json(endpoint(values))
        except BadRequest as error:
            return self._error(HTTPStatus.BAD_REQUEST, str(error))
        except NotFound as error:
            return self._error(HTTPStatus.NOT_FOUND, str(error))
        except Exception as error:  # one bad file must not end the server
            traceback.print_exc(file=sys.stderr)
            return self._error(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
        self._send(HTTPStatus.OK, "application/json", body)

    def _error(self, status: HTTPStatus, message: str) -> None:
        self._send(status, "application/json", to_json({"error": message}))

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the page sends a request every few seconds."""


class Server(http.server.ThreadingHTTPServer):
    """HTTP server with one thread per connection; the threads end with the process."""

    daemon_threads = True
    # A port that another viewer uses must be refused, so that the next one is tried.
    allow_reuse_port = False

    def __init__(
        self,
        host: str,
        port: int,
        endpoints: Mapping[str, Endpoint],
        changes: Mapping[str, Endpoint],
    ) -> None:
        self.host, self.endpoints, self.changes = host, endpoints, changes
        self.files = static_files()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), Handler)

    @property
    def url(self) -> str:
        """Address of the page."""
        host, port = self.server_address[:2]
        name = str(host)
        return f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closes the connection in the middle of a response."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def open_server(
    host: str,
    port: int,
    endpoints: Mapping[str, Endpoint],
    changes: Mapping[str, Endpoint] | None = None,
    *,
    tries: int = 20,
) -> Server:
    """A server on `port`, or on the next free port after it; port 0 takes any.

    `endpoints` answer GET requests; `changes` answer POST requests, of this page only.
    """
    for candidate in range(port, port + tries):
        try:
            return Server(host, candidate if port else 0, endpoints, changes or {})
        except OSError as error:
            busy = error.errno == errno.EADDRINUSE
            if not busy or candidate == port + tries - 1:
                raise
    raise AssertionError("not reached")
