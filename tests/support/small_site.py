"""A small site on the loopback address, which answers each path with given bytes."""

import socketserver
import ssl
import threading


def reply(body=b"", status="200 OK", **headers):
    """Returns the bytes of an answer that ends with the connection."""
    lines = [f"HTTP/1.1 {status}", "Connection: close", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def moved(target, status="302 Found"):
    return reply(status=status, Location=target)


class Handler(socketserver.StreamRequestHandler):
    """Sends what the server's `site` has for a path: bytes, or pieces of bytes."""

    def handle(self):
        site = self.server.site
        try:
            path = self.rfile.readline().split()[1].decode()
            head = [line.decode().strip() for line in iter(self.rfile.readline, b"\r\n")]
            answer = site.answers.get(path, reply(status="404 Not Found"))
            site.asked.append((path, next(line for line in head if line.startswith("Host: "))[6:]))
            for piece in [answer] if isinstance(answer, bytes) else answer():
                self.wfile.write(piece)
            site.ended.append(path)
        except (OSError, IndexError):  # the client has left, or did not want this site's TLS
            pass


class SmallSite:
    """Attributes: port, url; answers: by path, bytes or what makes pieces of them; asked: paths and hosts, as they
    came; ended: paths whose answers were sent whole."""

    def __init__(self, answers=(), certificate=None):
        self.answers, self.asked, self.ended = dict(answers), [], []
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.site, self._server.daemon_threads, self.port = self, True, self._server.server_address[1]
        self.url = f"http{'s' * bool(certificate)}://127.0.0.1:{self.port}"
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )

    def __enter__(self):
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
