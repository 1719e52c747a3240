"""Every call to a sandbox itself, by the Python SDK that PYTHONPATH leads to."""
import asyncio
import gzip
import time
import urllib.error
import urllib.request

from e2b import AsyncSandbox, CommandExitException, FileType, PtySize, Sandbox
from e2b.exceptions import (AuthenticationException, InvalidArgumentException, NotFoundException, SandboxException,
                            TimeoutException)


def raises(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} did not come")


def fetch(url, data=None, headers={}):
    """Opens a URL as anybody could who has it."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


sandbox = Sandbox.create(timeout=300, envs={"FROM": "sandbox", "BOTH": "sandbox"})
run, files = sandbox.commands.run, sandbox.files
assert sandbox.is_running()

# Commands.
done = run("echo $FROM $BOTH $MORE $HOME $USER; pwd; echo err >&2", envs={"BOTH": "call", "MORE": "more"})
assert done.stdout == "sandbox call more /home/user user\n/home/user\n" and done.stderr == "err\n", done
assert run("pwd", cwd="/tmp").stdout == "/tmp\n" and run("pwd; whoami", user="root").stdout == "/root\nroot\n"
failed = raises(CommandExitException, lambda: run("echo out; exit 3"))
assert (failed.exit_code, failed.stdout, failed.error) == (3, "out\n", "exit status 3")
raises(TimeoutException, lambda: run("sleep 60", timeout=1))
# The client goes by its own clock, and may have given up a moment before.
gone = "for i in $(seq 100); do pgrep -x sleep || { echo none; break; }; sleep 0.1; done"
assert run(gone).stdout.endswith("none\n"), "its time was up, so it was ended"
raises(AuthenticationException, lambda: run("true", user="nobody-here"))
raises(InvalidArgumentException, lambda: run("true", cwd="/nowhere"))
big = run("head -c 3000000 /dev/zero | tr '\\0' x; printf '\\xc3\\xa4'").stdout
assert len(big) == 3000001 and big[-1] == "ä"
assert run("test -t 0 || readlink /proc/self/fd/0").stdout == "/dev/null\n"

# Processes that go on.
cat = run("cat; echo over", background=True, stdin=True)
assert [(one.pid, one.cmd, one.args) for one in sandbox.commands.list()] == [(cat.pid, "/bin/bash", ["-l", "-c", "cat; echo over"])]
assert run(f"kill -0 {cat.pid}").exit_code == 0, "its number is the one inside"
sandbox.commands.send_stdin(cat.pid, "one\n")
again = sandbox.commands.connect(cat.pid)
cat.disconnect()
sandbox.commands.send_stdin(cat.pid, "two\n")
sandbox.commands.close_stdin(cat.pid)
end = again.wait()
assert end.stdout.endswith("two\nover\n") and end.exit_code == 0, end
assert sandbox.commands.list() == []
sleep = run("sleep 300", background=True)
assert sandbox.commands.kill(sleep.pid) and raises(CommandExitException, lambda: run(f"kill -0 {sleep.pid}"))
killed = raises(CommandExitException, sleep.wait)
assert (killed.exit_code, killed.error) == (-1, "signal: killed")
assert not sandbox.commands.kill(99999)
raises(NotFoundException, lambda: sandbox.commands.connect(99999))

# Terminals.
seen = []
pty = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=30)
sandbox.pty.resize(pty.pid, PtySize(rows=40, cols=100))
sandbox.pty.send_stdin(pty.pid, b"stty size; echo $TERM; exit 5\n")
raises(CommandExitException, lambda: pty.wait(on_pty=seen.append))
text = b"".join(seen).decode()
assert "40 100" in text and "xterm-256color" in text, text

# Files.
written = files.write("a/b.txt", "hello")
assert (written.path, written.name, written.type) == ("/home/user/a/b.txt", "b.txt", FileType.FILE)
assert files.read("~/a/b.txt") == "hello" and files.read("/home/user/a/b.txt", format="bytes") == b"hello"
data = bytes(range(256)) * 5000
files.write("/tmp/data", data)
assert files.read("/tmp/data", format="bytes") == data and b"".join(files.read("/tmp/data", format="stream")) == data
files.write("empty", "")
assert files.read("empty") == "" and len(files.read("/proc/sys/kernel/random/boot_id")) == 37
info = files.get_info("a/b.txt")
assert (info.size, info.mode, info.permissions, info.owner, info.group) == (5, 0o644, "-rw-r--r--", "user", "user")
files.write("/root/of-root", "x", user="root")
assert files.get_info("/root/of-root").owner == "root" and files.get_info("/root").type == FileType.DIR
several = files.write_files([{"path": "/tmp/m/1", "data": "1"}, {"path": "m 2", "data": b"2"}])
assert [one.path for one in several] == ["/tmp/m/1", "/home/user/m 2"] and files.read("m 2") == "2"
raises(NotFoundException, lambda: files.read("nothing"))
raises(InvalidArgumentException, lambda: files.read("/tmp"))
raises(InvalidArgumentException, lambda: files.write("/tmp", "x"))
raises(AuthenticationException, lambda: files.read("a/b.txt", user="nobody-here"))
assert files.make_dir("d/e") and not files.make_dir("d/e") and files.exists("d/e") and not files.exists("d/f")
assert files.rename("a/b.txt", "d/new/c.txt").path == "/home/user/d/new/c.txt"
run("ln -s new/c.txt d/link; ln -s nowhere d/broken")
tree = files.list("d", depth=3)
# What leads nowhere is neither file nor directory, and this SDK leaves it out.
assert [one.path for one in tree] == [f"/home/user/d/{name}" for name in ("e", "link", "new", "new/c.txt")]
assert (tree[1].symlink_target, tree[1].type, tree[0].type) == ("/home/user/d/new/c.txt", FileType.FILE, FileType.DIR)
raises(InvalidArgumentException, lambda: files.list("d/new/c.txt"))
raises(NotFoundException, lambda: files.list("nothing"))
files.remove("d")
files.remove("d")
assert not files.exists("d")

# What happens to files is told by the very next call.
files.make_dir("w")
watch = files.watch_dir("w", recursive=True)
for name in "xyz":
    files.write(f"w/{name}", "hello")
    kinds = [(event.name, event.type.value) for event in watch.get_new_events()]
    assert kinds == [(name, "create"), (name, "chmod"), (name, "write")], kinds
run("mkdir -p w/deep/er; echo x > w/deep/er/f; mv w/x w/deep/x; rm w/y")
kinds = {(event.name, event.type.value) for event in watch.get_new_events()}
assert {("deep/er/f", "create"), ("x", "rename"), ("deep/x", "create"), ("y", "remove")} <= kinds, kinds
watch.stop()
raises(NotFoundException, lambda: files.watch_dir("nothing"))
raises(InvalidArgumentException, lambda: files.watch_dir("/etc/passwd"))

# URLs that carry their own right.
url = sandbox.download_url("m 2", use_signature_expiration=60)
assert fetch(url) == (200, b"2") and fetch(url.replace("m", "n", 1))[0] in (400, 401, 404)
assert fetch(url + "0")[0] == 401 and fetch(sandbox.download_url("m 2", use_signature_expiration=-10)) == (
    401, b'{"code":401,"message":"signature is already expired"}')
bound = b'--x\r\nContent-Disposition: form-data; name="file"; filename="ignored"\r\n\r\nup\r\n--x--\r\n'
status, _ = fetch(sandbox.upload_url("up", use_signature_expiration=60), bound, {"Content-Type": "multipart/form-data; boundary=x"})
assert status == 200 and files.read("up") == "up"


async def asynchronously():
    other = await AsyncSandbox.connect(sandbox.sandbox_id)
    seen, told = [], asyncio.Event()

    def note(event):
        seen.append((event.name, event.type.value))
        if event.type.value == "write":
            told.set()

    handle = await other.files.watch_dir("w", on_event=note)
    await other.files.write("w/async", "x")
    await asyncio.wait_for(told.wait(), 10)
    await handle.stop()
    assert seen == [("async", "create"), ("async", "chmod"), ("async", "write")], seen
    # All at once, and each gets its own.
    results = await asyncio.gather(*(other.commands.run(f"echo {n}") for n in range(20)))
    assert [one.stdout for one in results] == [f"{n}\n" for n in range(20)]
    # A sandbox that is killed takes its streams along, and a client is told what that means.
    running = await other.commands.run("sleep 300", background=True)
    await other.kill()
    try:
        await asyncio.wait_for(running.wait(), 10)
    except (SandboxException, TimeoutException) as error:
        return str(error)
    raise AssertionError("it went on")


asyncio.run(asynchronously())
assert not sandbox.is_running()
print("done")
