"""What envd and the routes to it answer to those who do not do as the SDKs do: nothing but Python's own library."""
import base64
import gzip
import http.client
import json
import os
import socket
import struct
from urllib.parse import urlsplit

address = urlsplit(os.environ["E2B_API_URL"]).netloc
key = os.environ["E2B_API_KEY"]


def ask(method, path, body=None, headers={}):
    """Asks once, on a connection of its own."""
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data, answer


def control(method, path, body=None):
    status, data, _ = ask(method, path, json.dumps(body), {"X-API-KEY": key, "Content-Type": "application/json"})
    return status, json.loads(data or b"null")


def frame(message, flags=0):
    return struct.pack(">BI", flags, len(message)) + message


def frames(data):
    found = []
    while data:
        flags, length = struct.unpack(">BI", data[:5])
        found.append((flags, data[5:5 + length]))
        data = data[5 + length:]
    return found


status, made = control("POST", "/sandboxes", {"templateID": "base", "timeout": 300, "secure": True})
assert status == 201, made
box, token = made["sandboxID"], made["envdAccessToken"]
to = {"E2b-Sandbox-Id": box, "E2b-Sandbox-Port": "49983", "X-Access-Token": token}


def unary(method, body, kind="application/json", more={}):
    return ask("POST", method, body, {**to, "Content-Type": kind, **more})[:2]


def code(method, body, kind="application/json", more={}):
    """Returns the status and the code of a call that fails."""
    status, data = unary(method, body, kind, more)
    return status, json.loads(data)["code"]


def stream(method, data, kind="application/connect+json", more={}):
    status, data, answer = ask("POST", method, data, {**to, "Content-Type": kind, **more})
    assert status == 200 and answer.headers["Content-Type"] == kind, (status, data)
    return frames(data)


def failure(method, data, **more):
    (flags, last), = stream(method, data, **more)
    assert flags == 2
    return json.loads(last)["error"]["code"]


def start(command, **more):
    return json.dumps({"process": {"cmd": "/bin/bash", "args": ["-c", command]}, "stdin": False, **more}).encode()


def open_start(command, **more):
    """Starts a command on a connection of its own, and returns that once it has begun."""
    body = frame(start(command, **more))
    headers = {**to, "Content-Type": "application/connect+json", "Host": address, "Content-Length": len(body)}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    connection = socket.create_connection(tuple(address.rsplit(":", 1)), timeout=30)
    connection.sendall(f"POST /process.Process/Start HTTP/1.1\r\n{head}\r\n".encode() + body)
    seen = b""
    while b'"start"' not in seen:
        piece = connection.recv(4096)
        assert piece, seen
        seen += piece
    return connection


# Where a request goes.
for headers in ({"E2b-Sandbox-Id": box}, {"E2b-Sandbox-Port": "49983"}, {**to, "E2b-Sandbox-Port": "x"}):
    assert ask("GET", "/health", headers=headers)[0] == 400
for unknown in ("0" * 32, "../..", "x" * 5000, ""):
    status, data, _ = ask("GET", "/health", headers={**to, "E2b-Sandbox-Id": unknown})
    assert (status, json.loads(data)) == (502, {"sandboxId": unknown, "message": "The sandbox was not found", "code": 502})
assert ask("GET", "/health", headers={"Host": f"49983-{box}.any.domain"})[0] == 204
assert ask("GET", "/health", headers=to)[0] == 204
status, data, _ = ask("GET", "/", headers={**to, "E2b-Sandbox-Port": "8000"})
assert (status, json.loads(data)) == (502, {"sandboxId": box, "message": "The sandbox is running but port is not open", "port": 8000, "code": 502})

# Who may.
for bad in ("", "x", token[:-1], token + "0"):
    status, data, _ = ask("POST", "/process.Process/List", "{}", {**to, "X-Access-Token": bad, "Content-Type": "application/json"})
    assert (status, json.loads(data)["code"]) == (401, 401)
    assert ask("GET", "/files?path=/etc/passwd", headers={**to, "X-Access-Token": bad})[0] == 401
assert ask("GET", "/health", headers={**to, "X-Access-Token": ""})[0] == 204
assert ask("GET", "/files?path=/etc/passwd&signature=v1_x")[0] == 401, "nobody's signature"
assert ask("OPTIONS", "/process.Process/List", headers={**to, "Origin": "https://x"})[2].headers["Access-Control-Allow-Origin"] == "*"
for path in ("/init", "/freeze", "/upgrade", "/nothing", "/process.Process/Nothing", "/x.Y/Z"):
    assert ask("POST", path, "{}", {**to, "Content-Type": "application/json"})[0] == 404, path

# Calls with one answer.
assert unary("/process.Process/List", "{}") == (200, b'{"processes":[]}') == unary("/process.Process/List", "")
assert unary("/process.Process/List", gzip.compress(b"{}"), more={"Content-Encoding": "gzip"})[0] == 200
for bad in ("{", "[]", "7", '{"process":7}', b"\xff", "[" * 100000):
    assert code("/process.Process/SendSignal", bad) == (400, "invalid_argument"), bad
assert code("/process.Process/SendSignal", '{"process":{"pid":99999},"signal":"SIGNAL_SIGKILL"}') == (404, "not_found")
assert code("/process.Process/SendSignal", "{}") == (400, "invalid_argument")
assert code("/process.Process/List", "x", more={"Content-Encoding": "br"}) == (501, "unimplemented")
assert code("/process.Process/List", b"no gzip", more={"Content-Encoding": "gzip"}) == (400, "invalid_argument")
assert code("/process.Process/List", "{}", more={"Connect-Timeout-Ms": "soon"}) == (400, "invalid_argument")
assert code("/process.Process/List", gzip.compress(b" " * (20 << 20)), more={"Content-Encoding": "gzip"}) == (429, "resource_exhausted")
assert unary("/process.Process/List", "{}", "text/plain")[0] == 415 == unary("/process.Process/Start", "{}")[0]
assert code("/filesystem.Filesystem/Stat", '{"path":"nothing"}') == (404, "not_found")
assert code("/filesystem.Filesystem/Stat", '{"path":"~root/x"}') == (400, "invalid_argument")
assert code("/filesystem.Filesystem/Stat", json.dumps({"path": "/" + "x" * 5000})) == (400, "invalid_argument")
assert code("/filesystem.Filesystem/GetWatcherEvents", '{"watcherId":"w1"}') == (404, "not_found")
root = {"Authorization": "Basic " + base64.b64encode(b"root:").decode()}
status, data = unary("/filesystem.Filesystem/Stat", '{"path":"~"}', more=root)
entry = json.loads(data)["entry"]
assert (entry["path"], entry["type"], entry["owner"], int(entry["size"]) > 0) == ("/root", "FILE_TYPE_DIRECTORY", "root", True)
assert isinstance(entry["size"], str) and entry["modifiedTime"].endswith("Z")

# The same as protobuf, as another implementation would pack it.
status, data = unary("/filesystem.Filesystem/Stat", b"\x0a\x0b/etc/passwd", "application/proto")
assert status == 200 and b"/etc/passwd" in data and b"-rw-r--r--" in data and data[0] == 0x0a
assert code("/filesystem.Filesystem/Stat", b"\x0a\xff", "application/proto") == (400, "invalid_argument")
command = b"\x0a\x09/bin/echo\x12\x02hi"
events = stream("/process.Process/Start", frame(b"\x0a" + bytes([len(command)]) + command + b"\x20\x00"), "application/connect+proto")
assert [flags for flags, _ in events] == [0, 0, 0, 2] and events[-1][1] == b"{}"
assert events[1][1] == b"\x0a\x07\x12\x05\x0a\x03hi\n", events
assert b"exit status 0" in events[2][1]

# Streams.
events = [json.loads(data) for _, data in stream("/process.Process/Start", frame(start("echo out; echo err >&2; exit 4")))]
assert events[0]["event"]["start"]["pid"] > 1 and events[-1] == {}
assert events[-2] == {"event": {"end": {"exitCode": 4, "exited": True, "status": "exit status 4", "error": "exit status 4"}}}
assert sorted(list(one["event"]["data"].items())[0] for one in events[1:-2]) == [("stderr", "ZXJyCg=="), ("stdout", "b3V0Cg==")]
good = frame(start("true"))
for bad in (b"", good[:3], good[:20], good + good, good + b"\0", frame(b"{"), frame(b"[]"), frame(b"{}"), frame(b"{}", 0x40), frame(b"{}", 1)):
    assert failure("/process.Process/Start", bad) == "invalid_argument", bad
assert failure("/process.Process/Start", b"\0\xff\xff\xff\xff{") == "resource_exhausted"
assert failure("/process.Process/Start", frame(start("true")), more={"Connect-Timeout-Ms": "-1"}) == "invalid_argument"
assert failure("/process.Process/Start", frame(start("true", pty={"size": {"cols": 1 << 20, "rows": 1}}))) == "invalid_argument"
assert failure("/process.Process/Start", frame(b'{"process":{"cmd":"/no/such"}}')) == "invalid_argument"
assert failure("/process.Process/Connect", frame(b'{"process":{"tag":"nobody"}}')) == "not_found"
late = stream("/process.Process/Start", frame(start("echo x; sleep 60")), more={"Connect-Timeout-Ms": "700"})
assert json.loads(late[-1][1])["error"]["code"] == "deadline_exceeded"
quiet = stream("/process.Process/Start", frame(start("sleep 1.5")), more={"Keepalive-Ping-Interval": "1"})
assert json.loads(quiet[1][1])["event"] == {"keepalive": {}}

# Input as a stream, message by message.
tag = {"tag": "cat"}
reader = http.client.HTTPConnection(address, timeout=30)
body = json.dumps({"process": {"cmd": "/bin/cat"}, "tag": "cat"}).encode()
reader.request("POST", "/process.Process/Start", frame(body), {**to, "Content-Type": "application/connect+json"})
output = reader.getresponse()
messages = [{"start": {"process": tag}}, {"keepalive": {}}] + [{"data": {"input": {"stdin": base64.b64encode(text).decode()}}} for text in (b"one ", b"two\n")]
sent = stream("/process.Process/StreamInput", b"".join(frame(json.dumps(one).encode()) for one in messages))
assert sent == [(0, b"{}"), (2, b"{}")], sent
assert failure("/process.Process/StreamInput", frame(b'{"data":{"input":{"stdin":"eA=="}}}')) == "invalid_argument"
assert unary("/process.Process/CloseStdin", json.dumps({"process": tag}))[0] == 200
rest = frames(output.read())
text = b"".join(base64.b64decode(json.loads(data)["event"]["data"]["stdout"]) for flags, data in rest if b'"stdout"' in data)
assert text == b"one two\n", rest

# A client that vanishes leaves its process running.
gone = open_start("sleep 300", tag="left")
gone.close()
half = socket.create_connection(tuple(address.rsplit(":", 1)))
half.sendall(f"POST /process.Process/Start HTTP/1.1\r\nHost: {address}\r\nE2b-Sandbox-Id: {box}\r\nContent-Le".encode())
half.close()
assert [one["tag"] for one in json.loads(unary("/process.Process/List", "{}")[1])["processes"]] == ["left"]

# Files.
raw = {**to, "Content-Type": "application/octet-stream"}
assert ask("POST", "/files", b"x", raw)[0] == 400 == ask("POST", "/files?path=x", b"x", to)[0]
assert ask("POST", "/files?path=x", b"x", {**raw, "Content-Encoding": "zstd"})[0] == 400
assert ask("POST", "/files?path=x", b"no gzip", {**raw, "Content-Encoding": "gzip"})[0] == 400
assert ask("POST", "/files?path=x", gzip.compress(b"packed"), {**raw, "Content-Encoding": "gzip", "X-Metadata-Key": "value"})[0] == 200
status, data, answer = ask("GET", "/files?path=x", headers={**to, "Accept-Encoding": "gzip"})
assert (gzip.decompress(data), answer.headers["Content-Encoding"]) == (b"packed", "gzip")
assert json.loads(unary("/filesystem.Filesystem/Stat", '{"path":"x"}')[1])["entry"]["metadata"] == {"key": "value"}
status, data, _ = ask("POST", "/files?path=x", b"plain", raw)
assert json.loads(data) == [{"path": "/home/user/x", "name": "x", "type": "file"}]
assert "metadata" not in json.loads(unary("/filesystem.Filesystem/Stat", '{"path":"x"}')[1])["entry"], "what is written anew has none"
assert ask("GET", "/files?path=x", headers={**to, "Accept-Encoding": "identity;q=0"})[0] == 406
assert ask("POST", "/files?path=x", b"x", {**raw, "X-Metadata-Key": "v" * 5000})[0] == 400
assert ask("POST", "/files?path=x", b"x", {**raw, "Content-Type": "multipart/form-data"})[0] == 400
assert ask("POST", "/files", b"--x\r\ncut off", {**to, "Content-Type": "multipart/form-data; boundary=x"})[0] == 400
assert ask("GET", "/files?path=x&username=nobody-here", headers=to)[0] == 401
assert ask("GET", "/files?path=x%00y", headers=to)[0] == 400 and ask("GET", "/files?path=/proc/self/fd/0", headers=to)[0] == 400
assert ask("DELETE", "/files?path=x", headers=to)[0] == 405
assert ask("POST", "/files?path=ten", b"0123456789", raw)[0] == 200
for asked, part, place in (("0-3", b"0123", "bytes 0-3/10"), ("-2", b"89", "bytes 8-9/10"), ("8-99", b"89", "bytes 8-9/10")):
    status, data, answer = ask("GET", "/files?path=ten", headers={**to, "Range": f"bytes={asked}", "Accept-Encoding": "gzip"})
    assert (status, data, answer.headers["Content-Range"]) == (206, part, place), asked
status, data, answer = ask("GET", "/files?path=ten", headers={**to, "Range": "bytes=10-"})
assert (status, answer.headers["Content-Range"]) == (416, "bytes */10")
assert ask("GET", "/files?path=ten", headers={**to, "Range": "bytes=1-2,4-5"})[:2] == (200, b"0123456789")
# What the kernel says is empty and is not has no parts.
status, data, _ = ask("GET", "/files?path=/proc/version", headers={**to, "Range": "bytes=0-3"})
assert status == 200 and data.startswith(b"Linux version "), (status, data)

# A server inside that speaks WebSocket, by the headers and by a name.
server = r"""
import base64, hashlib, socket
listener = socket.create_server(("127.0.0.1", 8001))
print("up", flush=True)
while True:
    connection = listener.accept()[0]
    head = b""
    while b"\r\n\r\n" not in head:
        head += connection.recv(4096)
    key = [line.split(": ", 1)[1] for line in head.decode().split("\r\n") if line.lower().startswith("sec-websocket-key")][0]
    accept = base64.b64encode(hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()).decode()
    connection.sendall(f"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {accept}\r\n\r\n".encode())
    while piece := connection.recv(4096):
        connection.sendall(piece)
    connection.close()
"""
assert ask("POST", "/files?path=server.py", server.encode(), raw)[0] == 200
serving = open_start("exec python3 server.py")
seen = b""
while b'"stdout"' not in seen:
    seen += serving.recv(4096)
handshake = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}
for place in ({"Host": address, "E2b-Sandbox-Id": box, "E2b-Sandbox-Port": "8001"}, {"Host": f"8001-{box}.any.domain"}):
    socket_ = socket.create_connection(tuple(address.rsplit(":", 1)), timeout=30)
    head = "".join(f"{name}: {value}\r\n" for name, value in {**place, **handshake}.items())
    socket_.sendall(f"GET /chat HTTP/1.1\r\n{head}\r\n".encode())
    file = socket_.makefile("rb")
    assert file.readline() == b"HTTP/1.1 101 Switching Protocols\r\n"
    answer = {}
    while line := file.readline().strip():
        name, value = line.decode().split(": ", 1)
        answer[name.lower()] = value
    assert answer["sec-websocket-accept"] == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", answer
    for message in (b"\x81\x82abcd\x09\x0b", bytes(range(256))):
        socket_.sendall(message)
        assert file.read(len(message)) == message
    socket_.close()

# A sandbox that is killed resets what is open, and is not there any more.
open_stream = open_start("sleep 300")
assert control("DELETE", f"/sandboxes/{box}")[0] == 204
try:
    assert open_stream.recv(4096) is None, "it did not end with a reset"
except ConnectionResetError:
    pass
assert ask("GET", "/health", headers=to)[0] == 502
print("done")
