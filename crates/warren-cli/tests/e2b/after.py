"""Finds what `before.py` made, by the daemon that came after."""
import sys

from e2b import Sandbox, SandboxState

running, paused = sys.argv[1].split(",")
assert [Sandbox.get_info(id).state for id in (running, paused)] == [SandboxState.RUNNING, SandboxState.PAUSED]
one = Sandbox.connect(running)
assert one.get_info().metadata == {"a": "b"}
assert one.commands.run("cat kept; echo $X").stdout == "kepty\n"
assert len(one.commands.list()) == 1, "what ran still runs"
other = Sandbox.connect(paused)
assert other.commands.run("echo here").stdout == "here\n"
assert one.kill() and other.kill()
print("done")
