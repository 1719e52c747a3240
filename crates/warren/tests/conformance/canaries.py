"""What somebody leaves in a sandbox, and a look for it: `leave` or `look`; the word that marks it comes by stdin.

Each says a line of JSON. What is left and what is found have the same names.
"""
import ctypes
import json
import os
import shutil
import site
import socket
import stat
import subprocess
import sys

MODE, WORD = sys.argv[1], sys.stdin.readline().strip()
MARK = "canary-" + WORD
HOME, WORK = os.environ.get("HOME", "/"), os.getcwd()
KEY, TCP, TCP6, UDP = 0x77617272, 4711, 4712, 4713
PLACES = [
    "/tmp", "/var/tmp", "/dev/shm", "/run", HOME, WORK, "/", "/etc", "/home", "/opt", "/srv", "/var", "/mnt", "/dev",
    "/dev/mqueue", "/usr/local/bin", "/usr/lib/python3/dist-packages", "/sys/fs/cgroup", "/var/spool/cron/crontabs",
]
ADD_KEY, KEYCTL = (248, 250) if os.uname().machine == "x86_64" else (217, 219)
USER_KEYRING = -4
libc = ctypes.CDLL(None, use_errno=True)


def called(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def write(path, text, mode=0o644):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)
    os.chmod(path, mode)


def shell_files():
    echo = f"echo {MARK} >&2\n"
    write(f"{HOME}/.bashrc", echo)
    # A library that is loaded wherever it may be, and a program that comes before the one that is meant.
    library = next(p for p in ["/lib/x86_64-linux-gnu/libdl.so.2", "/lib/aarch64-linux-gnu/libdl.so.2"] if os.path.exists(p))
    shutil.copy(library, f"{HOME}/{MARK}.so")
    write(f"{HOME}/.profile", f"PATH=$HOME/.local/bin:$PATH\nexport LD_PRELOAD=$HOME/{MARK}.so\n")
    write(f"{HOME}/.local/bin/uname", f"#!/bin/sh\n{echo}", 0o755)


def git_hook():
    write(f"{HOME}/.gitconfig", f"[core]\n\thooksPath = {HOME}/hooks\n")
    write(f"{HOME}/hooks/post-commit", f"#!/bin/sh\necho {MARK} >&2\n", 0o755)


def stubborn():
    """A daemon without a parent or a session that no signal but one ends, with a port of each kind."""
    code = """if True:
        import os, signal, socket, sys, time
        kept = []
        def bind(family, kind, address):
            one = socket.socket(family, kind)
            one.bind(address)
            if kind == socket.SOCK_STREAM:
                one.listen(8)
            kept.append(one)
        said = []
        for name, *wanted in [
            ("h6 tcp", socket.AF_INET, socket.SOCK_STREAM, ("0.0.0.0", 4711)),
            ("h6 tcp6", socket.AF_INET6, socket.SOCK_STREAM, ("::1", 4712)),
            ("h6 udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 4713)),
            ("h6 abstract", socket.AF_UNIX, socket.SOCK_STREAM, "\\0" + sys.argv[1]),
        ]:
            try:
                bind(*wanted)
                said.append(name)
            except OSError:
                pass
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        os.write(int(sys.argv[2]), "\\n".join(said).encode())
        os.close(int(sys.argv[2]))
        while True:
            time.sleep(1)
    """
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open("/dev/null", os.O_RDWR)
            for fd in range(3):
                os.dup2(null, fd)
            os.set_inheritable(writer, True)
            os.execv("/usr/bin/python3", ["python3", "-c", code, MARK, str(writer)])
        os._exit(0)
    os.close(writer)
    os.wait()
    with os.fdopen(reader) as said:
        return said.read().split("\n")


def key_there():
    found = libc.syscall(KEYCTL, 10, USER_KEYRING, b"user", MARK.encode(), 0)
    return found if found > 0 else None


def leave():
    left, refused = [], {}

    def attempt(name, action):
        try:
            more = action()
            left.append(name)
            if isinstance(more, list):
                left.extend(more)
        except OSError as error:
            refused[name] = os.strerror(error.errno)

    for place in PLACES:
        attempt(f"h1 {place}", lambda: write(f"{place}/{MARK}", WORD))
    attempt("h1 modes", lambda: [os.chmod(place, 0o711) for place in [HOME, WORK]] and None)
    attempt("h2 shm", lambda: called(libc.shmget(KEY, 4096, 0o1666)))
    attempt("h2 sem", lambda: called(libc.semget(KEY, 1, 0o1666)))
    attempt("h2 msg", lambda: called(libc.msgget(KEY, 0o1666)))
    attempt("h2 mqueue", lambda: called(libc.mq_open(b"/" + MARK.encode(), os.O_CREAT | os.O_RDWR, 0o666, None)))
    add_key = lambda: called(libc.syscall(ADD_KEY, b"user", MARK.encode(), b"x", 1, USER_KEYRING))
    attempt("h3 key", add_key)
    attempt("h4 daemon", stubborn)
    attempt("h7 shell", shell_files)
    attempt("h7 preload", lambda: None)
    attempt("h7 shim", lambda: None)
    attempt("h7 ld.so.preload", lambda: write("/etc/ld.so.preload", f"{HOME}/{MARK}.so\n"))
    attempt("h7 git", git_hook)
    customize = f"LEFT = '{MARK}'\n"
    attempt("h7 python", lambda: write(f"{site.getusersitepackages()}/usercustomize.py", customize))
    attempt("h7 sitecustomize", lambda: write("/usr/lib/python3/dist-packages/sitecustomize.py", customize))
    attempt("h7 hosts", lambda: write("/etc/hosts", f"127.0.0.1 {MARK}\n"))
    return {"left": left, "refused": refused}


def output(*command):
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    return ended.stdout + ended.stderr


def look():
    found = set()
    # Whatever can be written, each mount by itself: nothing is left where nothing can be.
    mounts = [line.split() for line in open("/proc/self/mounts")]
    roots = {at for _, at, kind, options, *_ in mounts if "rw" in options.split(",") and kind not in ("proc", "sysfs")}
    for base, directories, files in (step for root in roots for step in os.walk(root)):
        directories[:] = [name for name in directories if not os.path.ismount(os.path.join(base, name))]
        for name in directories + files:
            if MARK in name:
                found.add(f"h1 {base}")
        for name in files:
            path = os.path.join(base, name)
            try:
                plain = os.lstat(path)
                if stat.S_ISREG(plain.st_mode) and plain.st_size < 1 << 16 and MARK in open(path, errors="replace").read():
                    found.add(f"h7 in {path}")
            except OSError:
                pass
    modes = {place: oct(os.stat(place).st_mode) for place in ["/", "/tmp", "/dev/shm", HOME, WORK] if os.path.exists(place)}
    if libc.shmget(KEY, 0, 0) >= 0:
        found.add("h2 shm")
    if libc.semget(KEY, 0, 0) >= 0:
        found.add("h2 sem")
    if libc.msgget(KEY, 0) >= 0:
        found.add("h2 msg")
    if libc.mq_open(b"/" + MARK.encode(), os.O_RDWR) >= 0:
        found.add("h2 mqueue")
    if key_there():
        found.add("h3 key")
    processes = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if pid in ("1", str(os.getpid())):
            continue
        try:
            line = open(f"/proc/{pid}/cmdline", "rb").read().decode(errors="replace")
        except OSError:
            continue
        processes.append(line)
        if MARK in line:
            found.add("h4 daemon")
        try:
            if WORD in open(f"/proc/{pid}/environ", "rb").read().decode(errors="replace"):
                found.add("h5 environment of another process")
        except OSError:
            pass
    if WORD in "".join(os.environ.values()):
        found.add("h5 environment")
    for name, family, address in [
        ("h6 tcp", socket.AF_INET, ("127.0.0.1", TCP)),
        ("h6 tcp6", socket.AF_INET6, ("::1", TCP6)),
        ("h6 abstract", socket.AF_UNIX, "\0" + MARK),
    ]:
        try:
            with socket.socket(family) as one:
                one.connect(address)
                found.add(name)
        except OSError:
            pass
    tables = {}
    for table in ["tcp", "tcp6", "udp", "udp6", "route", "ipv6_route", "arp"]:
        lines = open(f"/proc/net/{table}").read().splitlines()
        tables[table] = lines if table == "ipv6_route" else lines[1:]
    if any(f":{UDP:04X} " in line for line in tables["udp"]):
        found.add("h6 udp")
    # Address and state, and not what is counted of each. What this look's own connections leave for a moment listens no more.
    rows = {name: [line.split() for line in tables[name]] for name in ("tcp", "tcp6", "udp", "udp6")}
    listens = [f"{name} {row[1]}" for name in rows for row in rows[name] if name[:3] == "udp" or row[3] == "0A"]
    # Where a route leads, and not how often it was used.
    columns = {"route": [0, 1, 2, 3, 6, 7], "ipv6_route": [0, 1, 2, 3, 4, 5, 8, 9]}
    routes = [" ".join(line.split()[n] for n in numbers) for name, numbers in columns.items() for line in tables[name]]
    if MARK in output("bash", "-ic", ":"):
        found.add("h7 shell")
    login = output("bash", "-lc", "cat /proc/self/maps; uname")
    if f"{MARK}.so" in login:
        found.add("h7 preload")
    if f"{MARK}\n" in login:
        found.add("h7 shim")
    # What python runs by itself was run for this look, too.
    if MARK in getattr(sys.modules.get("usercustomize"), "LEFT", ""):
        found.add("h7 python")
    script = "d=$(mktemp -d) && cd $d && git init -q --template= && git -c user.name=x -c user.email=x commit -q --allow-empty -m x; rm -rf $d"
    if MARK in output("sh", "-c", script):
        found.add("h7 git")
    return {
        "found": sorted(found), "modes": modes, "environment": dict(os.environ), "processes": processes,
        "listens": sorted(listens), "routes": routes, "neighbours": tables["arp"],
        "hosts": [open(path).read() for path in ("/etc/hosts", "/etc/resolv.conf") if os.path.exists(path)],
    }


def keys():
    """Leaves a key and looks for it, as whoever may; it is gone then."""
    added = called(libc.syscall(ADD_KEY, b"user", MARK.encode(), b"x", 1, USER_KEYRING))
    found = key_there() == added
    called(libc.syscall(KEYCTL, 9, added, USER_KEYRING))
    return {"found": found and not key_there()}


print(json.dumps({"leave": leave, "look": look, "keys": keys}[MODE]()))
