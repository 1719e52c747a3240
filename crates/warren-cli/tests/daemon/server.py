"""What runs inside the sandbox: a decent server, one that speaks WebSocket, and one that is out to harm."""
import base64, hashlib, http.server, json, selectors, socket, struct, threading, time


class Decent(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, body, *headers):
        self.send_response(200)
        for header in (("Content-Length", str(len(body))), *headers):
            self.send_header(*header)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            left = int(self.headers.get("Content-Length", 0))
            while left:
                piece = self.rfile.read(min(left, 65536))
                left -= len(piece)
                yield piece
            return
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def do_any(self):
        digest, length = hashlib.sha256(), 0
        for piece in self.body():
            digest.update(piece)
            length += len(piece)
        name, _, query = self.path.partition("?")
        if name == "/chunked" or name == "/forever":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            count = 3 if name == "/chunked" else 1 << 60
            piece = b"x" * (1 if count == 3 else 65536)
            for i in range(count):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                if count == 3:
                    time.sleep(0.05)
            self.wfile.write(b"0\r\n\r\n")
        elif name == "/big":
            size = int(query)
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            piece = bytes(range(256)) * 256
            while size:
                self.wfile.write(piece[:size])
                size -= min(size, len(piece))
        elif name == "/slow":
            time.sleep(30)
        elif name == "/cookie":
            self.reply(b"<p>hi", ("Content-Type", "text/html"), ("Set-Cookie", "a=b"), ("Clear-Site-Data", '"*"'),
                       ("Content-Security-Policy", "default-src 'none'"), ("Connection", "x-hop"), ("X-Hop", "1"))
        else:
            said = {"method": self.command, "path": self.path, "length": length, "digest": digest.hexdigest(),
                    "headers": [[k.lower(), v] for k, v in self.headers.items()], "from": self.client_address[0]}
            self.reply(json.dumps(said).encode(), ("Content-Type", "application/json"))

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_OPTIONS = do_PROPFIND = do_any


def head(connection):
    text = b""
    while b"\r\n\r\n" not in text:
        piece = connection.recv(4096)
        if not piece:
            return ""
        text += piece
    return text.decode("latin-1")


def websocket(connection):
    """Echoes frames, after a handshake as RFC 6455 has it."""
    lines = head(connection).split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    key = next(line.split(": ", 1)[1] for line in lines if line.lower().startswith("sec-websocket-key"))
    assert headers["upgrade"] == "websocket" and headers["connection"] == "upgrade", headers
    accept = base64.b64encode(hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                       b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n")
    file = connection.makefile("rb")
    while start := file.read(2):
        length = start[1] & 127
        if length == 126:
            length = struct.unpack(">H", file.read(2))[0]
        mask = file.read(4)
        data = bytes(byte ^ mask[i % 4] for i, byte in enumerate(file.read(length)))
        size = bytes([length]) if length < 126 else b"\x7e" + struct.pack(">H", length)
        connection.sendall(start[:1] + size + data)
        if start[0] & 15 == 8:
            return


def hostile(connection):
    name = head(connection).split(" ")[1][1:]
    send = connection.sendall
    if name == "garbage":
        send(bytes(range(256)) * 64)
    elif name == "endless-headers":
        send(b"HTTP/1.1 200 OK\r\n")
        while True:
            send(b"A: " + b"x" * 1000 + b"\r\n")
    elif name == "endless-header":
        send(b"HTTP/1.1 200 OK\r\nA: ")
        while True:
            send(b"x" * 65536)
    elif name == "many-headers":
        send(b"HTTP/1.1 200 OK\r\n" + b"".join(b"H%d: x\r\n" % i for i in range(10000)) + b"\r\n")
    elif name == "endless-continue":
        while True:
            send(b"HTTP/1.1 100 Continue\r\n\r\n")
            time.sleep(0.001)
    elif name == "closes":
        pass
    elif name == "closes-in-head":
        send(b"HTTP/1.1 200 OK\r\nContent-Le")
    elif name == "breaks-off":
        send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nshort")
    elif name == "breaks-chunk":
        send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
    elif name == "two-lengths":
        send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nshort")
    elif name == "splits":
        send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecond")
    elif name == "switches":
        send(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nboo")
    elif name == "old":
        send(b"HTTP/1.0 200 OK\r\n\r\nto the end")
    elif name == "silent":
        time.sleep(30)


def flood(connection):
    while True:
        connection.sendall(b"x" * 65536)


def serve(port, handler):
    listener = socket.create_server(("127.0.0.1", port), backlog=256)

    def one(connection):
        with connection:
            try:
                handler(connection)
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass

    def accept():
        while True:
            threading.Thread(target=one, args=listener.accept()[:1], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def echo(port):
    """Echoes whatever comes on however many connections, in one thread."""
    listener = socket.create_server(("127.0.0.1", port), backlog=256)
    ready = selectors.DefaultSelector()
    ready.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in ready.select():
            if key.fileobj is listener:
                ready.register(listener.accept()[0], selectors.EVENT_READ)
                continue
            try:
                data = key.fileobj.recv(65536)
                key.fileobj.sendall(data)
            except OSError:
                data = b""
            if not data:
                ready.unregister(key.fileobj)
                key.fileobj.close()


threading.stack_size(256 << 10)
for port, handler in ((8001, websocket), (8002, hostile), (8004, flood)):
    serve(port, handler)
threading.Thread(target=echo, args=(8003,), daemon=True).start()
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Decent)
print("listening", flush=True)
server.serve_forever()
