"""A server whose sandboxes have no network takes what asks for less, says what is, and refuses what asks for more."""
from e2b import Sandbox
from e2b.exceptions import SandboxException

sandbox = Sandbox.create(timeout=60)
said = sandbox.commands.run("getent hosts example.com || echo none")
assert said.stdout == "none\n", said.stdout
info = Sandbox.get_info(sandbox.sandbox_id)
assert getattr(info, "allow_internet_access", False) is False, info
closed = Sandbox.create(timeout=60, allow_internet_access=False)
assert closed.kill()
try:
    Sandbox.create(network={"deny_out": ["0.0.0.0/0"], "allow_out": ["example.com"]})
except SandboxException as error:
    assert "without a network" in str(error), error
else:
    raise AssertionError("it was taken")
assert sandbox.kill()
print("done")
