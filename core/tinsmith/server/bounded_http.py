"""Uvicorn's HTTP/1.1 with a limit on the length of a request line, a header or a trailer.

Uvicorn's httptools reads them whole, whatever their size, before any key is checked. It copies what it has at every
read, so a single connection could block the event loop.
"""

from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES: Final = 1 << 16
"""The most that is read, after the first packet, without completing a part of the request."""

_TOO_LARGE: Final = b"""HTTP/1.1 431 Request Header Fields Too Large\r
content-type: application/json\r
content-length: 54\r
connection: close\r
\r
{"detail":"the request line and headers are too long"}"""


class BoundedHttp(HttpToolsProtocol):
    """One per connection."""

    _unfinished = 0  # bytes since the parser last completed a part that is bounded elsewhere
    _got_on = False

    def data_received(self, data: bytes) -> None:
        self._got_on = False
        super().data_received(data)
        self._unfinished = 0 if self._got_on else self._unfinished + len(data)
        if self._unfinished > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        self._got_on = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._got_on = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._got_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._got_on = True
        super().on_message_complete()
