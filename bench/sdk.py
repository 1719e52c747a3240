"""How long E2B's Python SDK takes from `Sandbox.create()` to the first output of a command, against each of several endpoints.

  sdk.py ROUNDS NAME=URL,KEY...    interleaved; prints JSON, {"series": {name: [ns]}, "errors": {}}
  sdk.py --stub PORT               serves as an endpoint that does nothing and answers at once, for the SDK's own share
"""
import base64
import http.server
import json
import struct
import sys
import time


class Stub(http.server.BaseHTTPRequestHandler):
    """Answers what the SDK asks with what it wants to hear."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    SANDBOX = {"templateID": "base", "sandboxID": "stub", "clientID": "stub", "envdVersion": "0.6.13", "envdAccessToken": "stub"}

    def log_message(self, *_):
        pass

    def reply(self, status, kind="application/json", body=b""):
        head = f"HTTP/1.1 {status} OK\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        self.wfile.write(head.encode() + body)

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.path.startswith("/process."):
            return self.reply(201, body=json.dumps(self.SANDBOX).encode())
        output = base64.b64encode(b"hi\n").decode()
        end = {"end": {"exited": True, "status": "exit status 0"}}
        events = [{"event": event} for event in ({"start": {"pid": 7}}, {"data": {"stdout": output}}, end)] + [{}]
        frames = b""
        for number, event in enumerate(map(json.dumps, events)):
            frames += struct.pack(">BI", 2 if number == 3 else 0, len(event)) + event.encode()
        self.reply(200, "application/connect+json", frames)

    def do_DELETE(self):
        self.reply(204)

    do_GET = do_DELETE


def first_output(url, key):
    """Returns when the sandbox was there and when the command first said something, from before the first call, in ns."""
    from e2b import Sandbox

    heard = []
    start = time.perf_counter_ns()
    sandbox = Sandbox.create(api_url=url, sandbox_url=url, api_key=key, timeout=60)
    there = time.perf_counter_ns()
    sandbox.commands.run("echo hi", on_stdout=lambda _: heard.append(time.perf_counter_ns()))
    sandbox.kill(api_url=url, api_key=key)
    return there - start, heard[0] - start


def main():
    if sys.argv[1] == "--stub":
        http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Stub).serve_forever()
    rounds = int(sys.argv[1])
    endpoints = [(name, *place.split(",")) for name, place in (argument.split("=", 1) for argument in sys.argv[2:])]
    series, errors = {}, {}
    for number in range(rounds + 1):
        for name, url, key in endpoints:
            if name in errors:
                continue
            try:
                created, heard = first_output(url, key)
            except Exception as error:  # noqa: BLE001: whatever it was, it is said
                errors[name] = repr(error)
                continue
            # The first is the one in which the SDK is still being loaded.
            if number:
                series.setdefault(f"{name}, create", []).append(created)
                series.setdefault(f"{name}, create to first output", []).append(heard)
    print(json.dumps({"series": series, "errors": errors}))


main()
