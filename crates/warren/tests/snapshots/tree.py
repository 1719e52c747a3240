"""Makes and changes trees of every kind of file, and says what a tree is.

`change SEED STEPS`, `show`, or `show apart`, which does not tell which names are the same file.

A file of a lower layer that is changed and then linked is two inodes to an overlayfs that was mounted in a user namespace
(docs/design/snapshots.md, "One file that is two inodes"). They have two numbers; each remembers the mode that was last
set by its own names; and a rename from one to the other is `ESTALE`. Nothing of ours can change that, so those three are
accepted here, and nothing that only looks like them.
"""
import errno
import hashlib
import mmap
import os
import random
import shutil
import socket
import stat
import sys

ROOTS = [b"/workspace", b"/tmp", b"/home/user", b"/var/tmp"]


def everything(kinds):
    found = []
    for root in ROOTS:
        for where, dirs, files in os.walk(root, followlinks=False):
            for name in dirs + files:
                path = os.path.join(where, name)
                if kinds(os.lstat(path).st_mode):
                    found.append(path)
    return sorted(found)


def unwaiting(path, flags):
    """There may be a FIFO already, which nobody reads."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def name(rng):
    kind = rng.randrange(6)
    if kind == 0:
        return bytes(rng.choice([c for c in range(1, 256) if c != 47]) for _ in range(rng.randrange(1, 20)))
    if kind == 1:
        return b"x" * 200 + str(rng.randrange(1000)).encode()
    if kind == 2:
        return rng.choice([b".wh.gone", b".wh..wh..opq", b"a b", b"new\nline", b"-rf", b"\xff\xfe"])
    return rng.choice([b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"])


def settle(rng, path, follow=True):
    """Gives a file its attributes."""
    mode = os.lstat(path).st_mode
    if not stat.S_ISLNK(mode):
        for _ in range(rng.randrange(3)):
            try:
                key = rng.choice([b"user.note", b"user.overlay.opaque", b"user.overlay.x", b"user.empty"])
                os.setxattr(path, key, bytes(rng.randrange(256) for _ in range(rng.randrange(50))))
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
                    raise
        if rng.randrange(3) == 0:
            choices = [0o644, 0o600, 0o755, 0o4755, 0o2755, 0o444, 0o400, 0o000, 0o1777, 0o777]
            if stat.S_ISDIR(mode):
                choices = [0o755, 0o700, 0o1777, 0o2755, 0o711, 0o750]
            os.chmod(path, rng.choice(choices))
    if rng.randrange(2) == 0:
        times = (rng.randrange(2**31) * 10**9 + rng.randrange(10**9),) * 2
        os.utime(path, ns=times, follow_symlinks=False)


def one_file(a, b):
    """Whether two names are the same file, by what the kernel asks the file itself and not its inode of it."""
    a, b = os.lstat(a), os.lstat(b)
    told = lambda found: (found.st_nlink, found.st_mode, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return a.st_nlink > 1 and told(a) == told(b)


def readable(path, found):
    """Opens a file that its owner may read, also where this name's inode remembers an older mode."""
    try:
        return open(path, "rb")
    except PermissionError:
        if found.st_nlink == 1:
            raise
        os.chmod(path, stat.S_IMODE(os.lstat(path).st_mode))
        return open(path, "rb")


def step(rng):
    dirs = ROOTS + everything(stat.S_ISDIR)
    where = rng.choice(dirs)
    path = os.path.join(where, name(rng))
    what = rng.randrange(14)
    files = everything(stat.S_ISREG)
    if what == 0:
        os.mkdir(path)
    elif what in (1, 2):
        with open(path, "wb", opener=unwaiting) as file:
            file.write(rng.randbytes(rng.choice([0, 1, 100, 4096, 70_000, 200_000])))
    elif what == 3:
        with open(path, "wb", opener=unwaiting) as file:
            file.seek(rng.randrange(1, 5_000_000))
            file.write(b"end")
            if rng.randrange(2):
                file.truncate(8_000_000)
    elif what == 4:
        os.symlink(rng.choice([b"/etc/passwd", b"../../..", b"gone", b"/" + b"x" * 300, path]), path)
    elif what == 5:
        os.mkfifo(path)
    elif what == 6:
        old = os.getcwd()
        os.chdir(os.path.dirname(path))
        try:
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(os.path.basename(path)[:90])
                path = os.path.join(os.path.dirname(path), os.path.basename(path)[:90])
        finally:
            os.chdir(old)
    elif what == 7 and files:
        os.link(rng.choice(files), path)
    elif what == 8 and files:
        path = rng.choice(files)
        with open(path, "ab") as file:
            file.write(rng.randbytes(rng.randrange(5000)))
    elif what == 9 and files:
        path = rng.choice(files)
        with open(path, "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if 0 < size < 1_000_000:
                before = os.fstat(file.fileno())
                with mmap.mmap(file.fileno(), size) as mapped:
                    mapped[rng.randrange(size)] = rng.randrange(256)
                os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif what == 10:
        gone = rng.choice(everything(lambda mode: True) or [None])
        if gone is None:
            return
        if stat.S_ISDIR(os.lstat(gone).st_mode):
            shutil.rmtree(gone)
            if rng.randrange(2):
                # The same name anew: it must hide what was there.
                os.mkdir(gone)
                path = gone
            else:
                return
        else:
            os.unlink(gone)
            return
    elif what == 11:
        some = everything(lambda mode: True)
        if not some:
            return
        old = rng.choice(some)
        try:
            os.rename(old, path)
        except OSError as error:
            if error.errno == errno.EXDEV or error.errno == errno.ESTALE and one_file(old, path):
                return
            raise
    else:
        some = everything(lambda mode: True)
        if not some:
            return
        path = rng.choice(some)
    settle(rng, path)


def change(seed, steps):
    rng = random.Random(seed)
    for _ in range(steps):
        try:
            step(rng)
        except OSError as error:
            allowed = (errno.EEXIST, errno.ENOTDIR, errno.EACCES, errno.EINVAL, errno.ENOTEMPTY, errno.ENAMETOOLONG,
                       errno.ENOENT, errno.EISDIR, errno.EBUSY, errno.ENXIO, errno.EPERM, errno.EADDRINUSE, errno.EXDEV, errno.ELOOP)
            if error.errno not in allowed:
                raise


def show():
    seen, links = [], {}
    for root in ROOTS:
        for path in [root] + sorted(everything_below(root)):
            found = os.lstat(path)
            is_dir = stat.S_ISDIR(found.st_mode)
            first = links.setdefault((found.st_dev, found.st_ino), path) if found.st_nlink > 1 and not is_dir else b""
            seen.append((path, found, first))
    for path, found, first in seen:
        kind = stat.S_IFMT(found.st_mode)
        line = [ascii(path), oct(found.st_mode), found.st_uid, found.st_gid]
        # What Warren made itself has the time of its making.
        line.append(0 if path in ROOTS else found.st_mtime_ns)
        if kind != stat.S_IFDIR:
            # A file of a layer counts names that a layer above hides, until the two are one.
            count = 0 if "uncounted" in sys.argv else found.st_nlink
            line += [found.st_size, count] + ([] if "apart" in sys.argv else [ascii(first)])
        if kind == stat.S_IFLNK:
            line.append(ascii(os.readlink(path)))
        if kind == stat.S_IFREG:
            if found.st_mode & 0o400 == 0:
                os.chmod(path, found.st_mode | 0o400)
            with readable(path, found) as file:
                line.append(hashlib.sha256(file.read()).hexdigest())
            if found.st_size > 1_000_000:
                line.append("sparse" if found.st_blocks * 512 < found.st_size // 2 else "full")
        if kind in (stat.S_IFREG, stat.S_IFDIR):
            line += [(ascii(key), os.getxattr(path, key).hex()) for key in sorted(os.listxattr(path)) if key.startswith("user.")]
            if found.st_mode & 0o400 == 0:
                os.chmod(path, found.st_mode & 0o7777)
        print(*line)


def everything_below(root):
    for where, dirs, files in os.walk(root, followlinks=False):
        for entry in dirs + files:
            yield os.path.join(where, entry)


if sys.argv[1] == "change":
    change(int(sys.argv[2]), int(sys.argv[3]))
else:
    show()
