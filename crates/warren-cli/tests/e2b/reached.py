"""What a sandbox that another daemon made reaches. Arguments: a port of this host, and the sandbox."""
import sys

from e2b import Sandbox

port, id = sys.argv[1:]
sandbox = Sandbox.connect(id, timeout=120)
said = sandbox.commands.run(f"for host in good.test other.test; do python3 /tmp/say.py $host {port}; done")
assert said.stdout.split() == ["ConnectionResetError", "hello"], said.stdout
assert sandbox.kill()
print("done")
