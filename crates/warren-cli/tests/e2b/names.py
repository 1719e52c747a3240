"""Ports of a sandbox by their names, over TLS: arguments are the port of the listener and the authority to trust."""
import http.client
import json
import os
import socket
import ssl
import sys
from urllib.parse import urlsplit

from e2b import Sandbox

port, authority = int(sys.argv[1]), sys.argv[2]
trust = ssl.create_default_context(cafile=authority)


def ask(host, path, headers={}):
    """Asks for a name that no resolver knows."""
    name = host.split(":")[0]
    connection = http.client.HTTPSConnection(name, port, timeout=30)
    connection.sock = trust.wrap_socket(socket.create_connection(("127.0.0.1", port)), server_hostname=name)
    connection.request("GET", path, headers={"Host": host, **headers})
    answer = connection.getresponse()
    return answer.status, answer.read()


sandbox = Sandbox.create(timeout=120, network={"allow_public_traffic": False, "mask_request_host": "inside:${PORT}"})
host = sandbox.get_host(8000)
assert host == f"8000-{sandbox.sandbox_id}.e2b.test:{port}", host
assert ask(sandbox.get_host(49983), "/health")[0] == 204
token = {"e2b-traffic-access-token": sandbox.traffic_access_token}
assert ask(host, "/")[0] == 403 == ask(host, "/", {"e2b-traffic-access-token": "x"})[0]
status, data = ask(host, "/", token)
assert (status, json.loads(data)["message"]) == (502, "The sandbox is running but port is not open")
sandbox.files.write("server.py", """
import http.server
class Show(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"{self.path} {self.headers['Host']} {self.headers['e2b-traffic-access-token']}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = http.server.HTTPServer(("127.0.0.1", 8000), Show)
print("up", flush=True)
server.serve_forever()
""")
server = sandbox.commands.run("python3 server.py", background=True)
next(iter(server))
assert ask(host, "/a?b=c", token) == (200, b"/a?b=c inside:8000 None")
sandbox.kill()
assert ask(host, "/", token)[0] == 502
try:
    ask("evil.test", "/")
    raise AssertionError("any name is vouched for")
except ssl.SSLError:
    pass
print("done")
