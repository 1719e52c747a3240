"""What sandboxes reach, by the rules of E2B. Arguments: a port of this host, where good.test and other.test lead."""
import sys
import time

from e2b import ALL_TRAFFIC, Sandbox
from e2b.exceptions import SandboxException

port = sys.argv[1]
SAY = "import socket, sys\ntry: print(socket.create_connection((sys.argv[1], sys.argv[2]), 5).recv(9).decode())\nexcept OSError as e: print(type(e).__name__)"


def reached(sandbox):
    """Says which of the two answer, and that an address of the host itself never does."""
    sandbox.files.write("/tmp/say.py", SAY)
    said = sandbox.commands.run(
        f"for host in good.test other.test 127.0.0.1 169.254.169.254; do python3 /tmp/say.py $host {port}; done"
    )
    good, other, loopback, metadata = said.stdout.split()
    assert (loopback, metadata) == ("ConnectionRefusedError", "OSError"), said.stdout
    return [good == "hello", other == "hello"]


def shown(sandbox):
    return Sandbox.get_info(sandbox.sandbox_id)


sandbox = Sandbox.create(timeout=120)
assert reached(sandbox) == [True, True], "as E2B's do"
# Everything is looked up outside, and by all who ask.
assert sandbox.commands.run("getent hosts good.test").stdout.startswith("198.18.")
assert sandbox.commands.run("getent hosts good.test", user="root").exit_code == 0
assert sandbox.commands.run("sudo getent hosts good.test").exit_code == 0
if hasattr(sandbox, "update_network"):
    for rules, expected in (
        ({"deny_out": [ALL_TRAFFIC]}, [False, False]),
        ({"deny_out": [ALL_TRAFFIC], "allow_out": ["good.test"]}, [True, False]),
        ({"deny_out": [ALL_TRAFFIC], "allow_out": ["*.test"]}, [True, True]),
        ({"deny_out": ["127.0.0.0/8"]}, [False, False]),
        ({"deny_out": ["127.0.0.0/8"], "allow_out": ["8.8.8.8"]}, [False, False]),
        ({}, [True, True]),
        ({"allow_internet_access": False}, [False, False]),
    ):
        sandbox.update_network(rules)
        assert reached(sandbox) == expected, rules
    # It stays so for a fork, when it goes on, and when it is booted anew.
    forks = sandbox.fork() if hasattr(sandbox, "fork") else []
    for fork in forks if isinstance(forks, list) else [forks]:
        fork = getattr(fork, "sandbox", fork)
        assert reached(fork) == [False, False], "a fork"
        fork.kill()
    sandbox.pause()
    sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=120)
    assert reached(sandbox) == [False, False], "it went on"
    for bad in ({"allow_out": ["good.test"]}, {"allow_out": ["10.0.0.1"]}, {"deny_out": ["good.test"]}):
        try:
            sandbox.update_network(bad)
        except SandboxException as error:
            assert "400" in str(error), error
        else:
            raise AssertionError(f"it was taken: {bad}")
    assert reached(sandbox) == [False, False], "as it was"
sandbox.kill()

closed = Sandbox.create(timeout=120, allow_internet_access=False)
assert reached(closed) == [False, False]
assert closed.kill()

some = Sandbox.create(timeout=120, network={"deny_out": [ALL_TRAFFIC], "allow_out": ["other.test"]})
assert reached(some) == [False, True]
print(some.sandbox_id)
