"""Makes a sandbox and prints its id: `after.py` finds it again."""
from e2b import Sandbox

one = Sandbox.create(timeout=300, metadata={"a": "b"}, envs={"X": "y"})
one.files.write("/home/user/kept", "kept")
one.commands.run("sleep 300", background=True)
other = Sandbox.create(timeout=300)
other.pause()
print(f"{one.sandbox_id},{other.sandbox_id}")
