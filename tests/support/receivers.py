"""What notices are sent to, on loopback: an HTTP receiver and a mail server that can be told to fail first."""

import contextlib
import socketserver
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def _running(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def webhook_receiver(answers=()):
    """Yields (address, got): `got` has (headers, body) of each request; `answers`: the first statuses (0: hang up)."""
    left, got = list(answers), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((dict(self.headers), body))
            status = left.pop(0) if left else 204
            if status == 0:
                self.connection.close()
                return
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_):
            pass

    with _running(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as server:
        yield f"http://127.0.0.1:{server.server_address[1]}/hooks?tenant=7", got


@contextlib.contextmanager
def mail_server(answers=()):
    """Yields (port, got): `got` has (recipient, message) of each mail; `answers`: the first replies to a message."""
    left, got = list(answers), []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            self.say("220 test")
            to = ""
            while line := self.rfile.readline().decode().strip():
                if line.upper().startswith("RCPT TO:"):
                    to = line.partition("<")[2].rpartition(">")[0]
                if line.upper() == "QUIT":
                    self.say("221 bye")
                    return
                if line.upper() != "DATA":
                    self.say("250 ok")
                    continue
                self.say("354 go on")
                lines = []
                while (text := self.rfile.readline()) != b".\r\n":
                    lines.append(text)
                reply = left.pop(0) if left else "250 taken"
                if reply.startswith("2"):
                    got.append((to, b"".join(lines)))
                self.say(reply)

        def say(self, text):
            self.wfile.write(f"{text}\r\n".encode())

    with _running(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)) as server:
        yield server.server_address[1], got
