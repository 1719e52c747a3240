"""Every call of the control plane, by the Python SDK that PYTHONPATH leads to."""
import time
from datetime import datetime, timedelta, timezone
from uuid import uuid4

from e2b import Sandbox, SandboxQuery, SandboxState
from e2b.exceptions import SandboxException

mark = str(uuid4())


def listed(**query):
    pages, found = Sandbox.list(query=SandboxQuery(metadata={"a b": "1&2+3", "mark": mark}, **query), limit=1), []
    while pages.has_next:
        found += [one.sandbox_id for one in pages.next_items()]
    return found


def raises(call, *kinds):
    try:
        call()
    except kinds as error:
        return str(error)
    raise AssertionError("it did not fail")


before = datetime.now(timezone.utc) - timedelta(seconds=2)
one = Sandbox.create("base", timeout=120, metadata={"a b": "1&2+3", "mark": mark}, envs={"X": "y"})
two = Sandbox.create(timeout=120, metadata={"a b": "1&2+3", "mark": mark})
assert len(one.sandbox_id) == 32 and one.sandbox_id.isalnum()

info = one.get_info()
assert info.state == SandboxState.RUNNING and info.metadata["a b"] == "1&2+3" and info.template_id == "base"
assert before < info.started_at < info.end_at < info.started_at + timedelta(seconds=121)
assert listed() == [two.sandbox_id, one.sandbox_id], "the newest first"
assert listed(state=[SandboxState.PAUSED]) == []
result = one.commands.run("echo $X $(whoami) $(sudo whoami) $(pwd); python -c 'print(6*7)'")
assert result.stdout == "y user root /home/user\n42\n", result
assert one.commands.run("whoami", user="root").stdout == "root\n"
one.files.write("/home/user/kept", "kept")

# Time: connecting never takes any away.
one.connect(timeout=10)
assert one.get_info().end_at == info.end_at
one.connect(timeout=300)
assert one.get_info().end_at > info.end_at
one.set_timeout(60)
assert one.get_info().end_at < info.end_at

# Pause and go on, with all that runs and with files alone.
left = one.commands.run("sleep 300", background=True)
boot = one.files.read("/proc/sys/kernel/random/boot_id")
assert one.pause() and not one.is_running() and listed(state=[SandboxState.PAUSED]) == [one.sandbox_id]
assert not one.pause(), "it is paused already"
one.connect(timeout=60)
assert one.is_running() and one.files.read("/proc/sys/kernel/random/boot_id") == boot
assert left.pid in [process.pid for process in one.commands.list()]
assert one.pause(keep_memory=False)
one.connect(timeout=60)
assert one.files.read("/proc/sys/kernel/random/boot_id") != boot and one.files.read("/home/user/kept") == "kept"
assert one.commands.list() == []

# Forks and snapshots.
forks = one.fork(count=2)
assert [fork.files.read("/home/user/kept") for fork in forks] == ["kept", "kept"]
forks[0].files.write("/home/user/kept", "changed")
assert forks[1].files.read("/home/user/kept") == one.files.read("/home/user/kept") == "kept"
assert all(fork.kill() for fork in forks)
plain, named = one.create_snapshot(), one.create_snapshot(name=f"snap-{mark}")
assert any(mark in name for name in named.names)
for snapshot in (plain, named):
    made = Sandbox.create(snapshot.snapshot_id, timeout=60)
    assert made.files.read("/home/user/kept") == "kept" and made.kill()
    assert snapshot.snapshot_id in [s.snapshot_id for s in Sandbox.list_snapshots(sandbox_id=one.sandbox_id).next_items()]
    assert Sandbox.delete_snapshot(snapshot.snapshot_id) and not Sandbox.delete_snapshot(snapshot.snapshot_id)

metrics = one.get_metrics()
assert metrics and metrics[0].cpu_count > 0 and metrics[0].mem_total > 0
assert one.get_metrics(start=datetime(2020, 1, 1), end=datetime(2020, 1, 2)) == []

# The end, by request and by time.
two.set_timeout(1)
time.sleep(2)
assert listed() == [one.sandbox_id] and not two.is_running()
assert one.kill() and not one.kill() and listed() == []
assert "404" in raises(lambda: Sandbox.create("no-such-template"), SandboxException)
raises(one.get_info, SandboxException)
kept = Sandbox.create(timeout=1, lifecycle={"on_timeout": "pause"})
time.sleep(2)
assert kept.get_info().state == SandboxState.PAUSED and kept.kill()
print("done")
