// The attacker: makes one raw attempt per case and says what the kernel answered.
//
//     probe CASE [ARGS] [+ CASE [ARGS]]...
//
// prints one line per case, `CASE result=<OK, errno name or killed> detail`, and exits 0 when every
// attempt was made, whatever came of it. It judges nothing: the tests know what each answer should be.
// Each case runs in a child of its own, so that one that is killed or changes its process costs the
// others nothing; `probe direct CASE` leaves the child out. Built static: it must run in an empty root.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <linux/capability.h>
#include <linux/fuse.h>
#include <linux/perf_event.h>
#include <mqueue.h>
#include <poll.h>
#include <pty.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>
#include <utmp.h>

#define KEYRING_USER (-4)
#define KEYRING_PROCESS (-2)

static const char *name = "probe";
extern char **environ;

// Writes the line of this case: one write, so that lines of several processes do not mix.
static void say(const char *result, const char *format, ...) {
    char line[8192];
    int n = snprintf(line, sizeof line, "%s result=%s ", name, result);
    va_list args;
    va_start(args, format);
    int m = vsnprintf(line + n, sizeof line - n - 2, format, args);
    va_end(args);
    n += m < (int)sizeof line - n - 2 ? m : (int)sizeof line - n - 3;
    for (int i = 0; i < n; i++)
        if (line[i] == '\n' || line[i] == 0) line[i] = ' ';
    line[n++] = '\n';
    if (write(1, line, n) != n) _exit(3);
}

static const char *errname(int e) {
    const char *s = e ? strerrorname_np(e) : "OK";
    return s ? s : "E?";
}

static const char *verdict(long r) { return r < 0 ? errname(errno) : "OK"; }
static void answer(long r) { say(verdict(r), ""); }
static long number(const char *s) { return strtol(s, NULL, 0); }
static char *arg(char **a, int i) {
    for (int k = 0; k < i; k++)
        if (!a[k]) goto missing;
    if (a[i]) return a[i];
missing:
    dprintf(2, "probe: %s lacks argument %d\n", name, i);
    _exit(2);
}
static long now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}
static void nap(long ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}
static ssize_t slurp(const char *path, char *buffer, size_t size) {
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (fd < 0) return -1;
    size_t have = 0;
    ssize_t n = 0;
    while (have < size - 1 && (n = read(fd, buffer + have, size - 1 - have)) > 0) have += n;
    int e = errno;
    close(fd);
    buffer[have] = 0;
    errno = e;
    return have || n == 0 ? (ssize_t)have : -1;
}

// --- files ---

static void c_read(char **a) {
    char text[4096];
    ssize_t n = slurp(arg(a, 1), text, sizeof text);
    say(verdict(n), "bytes=%zd text=%s", n, n > 0 ? text : "");
}
// Opening for writing is the whole attempt: nothing is written, so it is safe on the bare host too.
// A file that /dev/null lies over takes writes and forgets them: that is `null`, not `OK`.
static void c_write(char **a) {
    struct stat s;
    int fd = open(arg(a, 1), O_WRONLY | O_NONBLOCK | O_NOCTTY);
    bool null = fd >= 0 && fstat(fd, &s) == 0 && S_ISCHR(s.st_mode) && s.st_rdev == makedev(1, 3);
    say(null ? "null" : verdict(fd), "");
}
static void c_append(char **a) {
    int fd = open(arg(a, 1), O_WRONLY | O_APPEND);
    answer(fd < 0 ? fd : write(fd, "hostile", 7));
}
static void c_put(char **a) {
    int fd = open(arg(a, 1), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    answer(fd < 0 ? fd : write(fd, arg(a, 2), strlen(arg(a, 2))));
}
static void c_rewrite(char **a) {
    int fd = open(arg(a, 1), O_RDWR | O_TRUNC);
    answer(fd < 0 ? fd : pwrite(fd, "hostile", 7, 0));
}
static void c_truncate(char **a) { answer(truncate(arg(a, 1), 0)); }
static void c_chmod(char **a) { answer(chmod(arg(a, 1), 04777)); }
static void c_chown(char **a) { answer(chown(arg(a, 1), 12345, 12345)); }
static void c_unlink(char **a) { answer(unlink(arg(a, 1))); }
static void c_mkdir(char **a) { answer(mkdir(arg(a, 1), 0777)); }
static void c_rename(char **a) { answer(rename(arg(a, 1), arg(a, 2))); }
static void c_link(char **a) { answer(link(arg(a, 1), arg(a, 2))); }
static void c_setxattr(char **a) { answer(setxattr(arg(a, 1), "user.hostile", "1", 1, 0)); }
static void c_stat(char **a) {
    struct stat s;
    int r = lstat(arg(a, 1), &s);
    if (r < 0) return answer(r);
    say("OK", "mode=%o uid=%d gid=%d type=%c", s.st_mode & 07777, s.st_uid, s.st_gid,
        S_ISREG(s.st_mode) ? 'f' : S_ISDIR(s.st_mode) ? 'd' : S_ISCHR(s.st_mode) ? 'c' : S_ISBLK(s.st_mode) ? 'b' : '?');
}
static void c_list(char **a) {
    DIR *d = opendir(arg(a, 1));
    if (!d) return answer(-1);
    char names[6000] = "";
    int count = 0;
    for (struct dirent *e; (e = readdir(d));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        count++;
        if (strlen(names) + strlen(e->d_name) + 2 < sizeof names) strcat(strcat(names, e->d_name), " ");
    }
    say("OK", "count=%d names= %s", count, names);
}
static void c_cwd(char **a) {
    (void)a;
    char path[PATH_MAX];
    char *r = getcwd(path, sizeof path);
    say(verdict(r ? 0 : -1), "cwd=%s", r ? path : "");
}
// walk-up PATH: reads PATH by forty `..` from the working directory and from a descriptor of the root.
static void c_walk_up(char **a) {
    char path[PATH_MAX] = "", text[256];
    for (int i = 0; i < 40; i++) strcat(path, "../");
    strcat(path, arg(a, 1)[0] == '/' ? a[1] + 1 : a[1]);
    ssize_t n = slurp(path, text, sizeof text);
    if (n >= 0) return say("OK", "from=cwd text=%s", text);
    int e = errno, root = open("/", O_PATH | O_DIRECTORY);
    int fd = openat(root, path, O_RDONLY);
    if (fd < 0) return say(errname(e), "root=%s", errname(errno));
    n = read(fd, text, sizeof text - 1);
    text[n > 0 ? n : 0] = 0;
    say("OK", "from=root text=%s", text);
}
// chroot-out DIR PATH: the classic way out of a bare chroot, then reads PATH.
static void c_chroot_out(char **a) {
    char text[256];
    mkdir(arg(a, 1), 0755);
    int fd = open("/", O_RDONLY | O_DIRECTORY);
    if (chroot(a[1]) < 0) return say(verdict(-1), "step=chroot");
    if (fchdir(fd) < 0) return say(verdict(-1), "step=fchdir");
    for (int i = 0; i < 64 && chdir("..") == 0; i++) {}
    if (chroot(".") < 0) return say(verdict(-1), "step=chroot2");
    ssize_t n = slurp(arg(a, 2), text, sizeof text);
    say(verdict(n), "text=%s", n > 0 ? text : "");
}
// by-handle MOUNT: opens inode 2 (the root of an ext4) by its handle, through a file of that mount.
static void c_by_handle(char **a) {
    struct { struct file_handle h; uint32_t ino, gen; } handle = {{8, 1, {}}, 2, 0};
    int at = open(arg(a, 1), O_RDONLY | O_DIRECTORY);
    if (at < 0) return say(verdict(at), "step=open");
    int fd = syscall(SYS_open_by_handle_at, at, &handle, O_RDONLY);
    say(verdict(fd), "step=handle");
}
// moved-cwd DIR PATH: sits in DIR/a/b, waits for the end of its input, when `a` was moved away, then reads ../../PATH.
static void c_moved_cwd(char **a) {
    char path[PATH_MAX], text[256];
    snprintf(path, sizeof path, "%s/a/b", arg(a, 1));
    if (chdir(path) < 0) return say(verdict(-1), "step=chdir");
    say("OK", "step=chdir");
    while (read(0, text, 1) > 0) {}
    snprintf(path, sizeof path, "../../%s", arg(a, 2));
    ssize_t n = slurp(path, text, sizeof text);
    say(verdict(n), "text=%s", n > 0 ? text : "");
}
static int writable, visited;
static char found[4000];
static void walk(const char *path, int depth) {
    DIR *d = depth > 12 ? NULL : opendir(path);
    if (!d) return;
    for (struct dirent *e; (e = readdir(d));) {
        char below[PATH_MAX];
        struct stat s;
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        snprintf(below, sizeof below, "%s/%s", strcmp(path, "/") ? path : "", e->d_name);
        if (lstat(below, &s) < 0) continue;
        if (S_ISDIR(s.st_mode)) walk(below, depth + 1);
        if (!S_ISREG(s.st_mode)) continue;
        visited++;
        int fd = open(below, O_WRONLY | O_NONBLOCK);
        if (fd < 0) continue;
        close(fd);
        writable++;
        if (strlen(found) + strlen(below) + 2 < sizeof found) strcat(strcat(found, below), " ");
    }
    closedir(d);
}
// writable-below DIR: how many regular files under DIR open for writing. Nothing is written.
static void c_writable_below(char **a) {
    walk(arg(a, 1), 0);
    say(writable ? "OK" : "none", "writable=%d visited=%d found=%s", writable, visited, found);
}
static void c_uname(char **a) {
    (void)a;
    struct utsname u;
    int r = uname(&u);
    say(verdict(r), "node=%s", u.nodename);
}
static void c_copy(char **a) {
    static char bytes[8 << 20];
    ssize_t n = slurp(arg(a, 1), bytes, sizeof bytes);
    int fd = open(arg(a, 2), O_WRONLY | O_CREAT | O_TRUNC, 0755);
    answer(n < 0 || fd < 0 ? -1 : write(fd, bytes, n));
}

// --- descriptors, environment ---

static void c_fds(char **a) {
    (void)a;
    char list[4000] = "", link[64], target[512];
    int count = 0;
    for (int fd = 3; fd < 20000; fd++) {
        if (fcntl(fd, F_GETFD) < 0) continue;
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(link, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        count++;
        if (strlen(list) + strlen(target) + 16 < sizeof list) sprintf(list + strlen(list), "%d=%s ", fd, target);
    }
    say("OK", "count=%d %s", count, list);
}
// Opens what a careless caller leaves open, none of it close-on-exec, and becomes CMD.
static void c_with_fds(char **a) {
    int pair[2];
    dup2(open(arg(a, 1), O_RDONLY | O_DIRECTORY), 5);
    dup2(open(a[1], O_PATH | O_DIRECTORY), 7);
    dup2(open(arg(a, 2), O_RDWR), 8);
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0) dup2(pair[0], 9);
    dup2(5, 100);
    dup2(5, 1023);
    execv(arg(a, 3), a + 3);
    answer(-1);
}
// with-stdin PATH CMD: becomes CMD with PATH, perhaps a directory, as its standard input.
static void c_with_stdin(char **a) {
    dup2(open(arg(a, 1), O_RDONLY), 0);
    execv(arg(a, 2), a + 2);
    answer(-1);
}
static void c_read_at(char **a) {
    char text[256];
    int fd = openat(number(arg(a, 1)), arg(a, 2), O_RDONLY);
    ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    text[n > 0 ? n : 0] = 0;
    say(verdict(n), "text=%s", text);
}
static int each_pid(void (*visit)(int)) {
    DIR *d = opendir("/proc");
    int seen = 0;
    for (struct dirent *e; d && (e = readdir(d));)
        if (atoi(e->d_name) > 0) visit(atoi(e->d_name)), seen++;
    if (d) closedir(d);
    return seen;
}
static void note(const char *text) {
    if (strlen(found) + strlen(text) + 2 < sizeof found) strcat(strcat(found, text), " ");
}
static void foreign_fds(int pid) {
    char path[64], link[512], target[512];
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    DIR *d = pid == getpid() || pid == getppid() ? NULL : opendir(path);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (e->d_name[0] == '.') continue;
        snprintf(link, sizeof link, "%s/%s", path, e->d_name);
        ssize_t n = readlink(link, target, sizeof target - 1);
        target[n > 0 ? n : 0] = 0;
        visited++;
        // A pipe or socket has no path and leads nowhere; what can be opened by name can be used.
        struct stat s;
        if (n > 0 && target[0] == '/' && strncmp(target, "/dev/", 5) && stat(link, &s) == 0) note(target);
    }
    if (d) closedir(d);
}
static void c_foreign_fds(char **a) {
    (void)a;
    int pids = each_pid(foreign_fds);
    say(*found ? "OK" : "none", "pids=%d links=%d found=%s", pids, visited, found);
}
// groups-by-init: opens for writing what PID 1 has open, and the control groups that are found by it; /dev/null is
// anybody's. Descriptors without a path are tried as well.
static void c_groups_by_init(char **a) {
    (void)a;
    const char *below[] = {"", "/cgroup.procs", "/../cgroup.procs", "/tasks", "/pids.max", "/../pids.max"};
    char path[128], target[512];
    for (int fd = 0; fd < 256; fd++) {
        snprintf(path, sizeof path, "/proc/1/fd/%d", fd);
        ssize_t n = readlink(path, target, sizeof target - 1);
        if (n < 0) continue;
        target[n] = 0;
        visited++;
        for (size_t i = 0; i < sizeof below / sizeof *below && strcmp(target, "/dev/null"); i++) {
            snprintf(path, sizeof path, "/proc/1/fd/%d%s", fd, below[i]);
            if (open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY) >= 0 || errno == ENOSPC) note(path);
        }
        snprintf(path, sizeof path, "/proc/1/fd/%d/hostile", fd);
        if (strcmp(target, "/tmp") && mkdir(path, 0755) == 0) note(path);
    }
    say(*found ? "OK" : "none", "seen=%d found=%s", visited, found);
}
static const char *needle;
static bool holds(const char *path) {
    static char text[1 << 20];
    ssize_t n = slurp(path, text, sizeof text);
    return n > 0 && memmem(text, n, needle, strlen(needle));
}
static void look_in(int pid) {
    const char *files[] = {"environ", "cmdline", "status", "mountinfo", "mounts", "cgroup"};
    char path[64];
    for (int i = 0; i < 6; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", pid, files[i]);
        // Our own arguments hold the needle, for that is how we were told it.
        bool ours = i == 1 && (pid == getpid() || pid == getppid() || pid == 1);
        if (!ours && holds(path)) note(path);
    }
}
// find-in-proc TEXT: which files of which visible process contain TEXT.
static void c_find_in_proc(char **a) {
    needle = arg(a, 1);
    int pids = each_pid(look_in);
    for (char **e = environ; *e; e++)
        if (strstr(*e, needle)) note(*e);
    say(*found ? "OK" : "none", "pids=%d found=%s", pids, found);
}
static void see_pid(int pid) {
    char text[16];
    sprintf(text, "%d", pid);
    note(text);
}
static void c_pids(char **a) {
    (void)a;
    int pids = each_pid(see_pid);
    say("OK", "count=%d pids= %s", pids, found);
}
static void try_exe(int pid) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/exe", pid);
    visited++;
    int fd = open(path, O_WRONLY);
    // That a text is busy is said before that its mount is read-only, and ends with the process.
    if (fd >= 0 || (errno == ETXTBSY && access(path, W_OK) == 0)) note(path);
}
static void c_write_any_exe(char **a) {
    (void)a;
    each_pid(try_exe);
    say(*found ? "OK" : "none", "visited=%d found=%s", visited, found);
}
static void c_kallsyms(char **a) {
    (void)a;
    FILE *f = fopen("/proc/kallsyms", "r");
    if (!f) return answer(-1);
    unsigned long long address, top = 0;
    char line[512];
    while (fgets(line, sizeof line, f))
        if (sscanf(line, "%llx", &address) == 1 && address > top) top = address;
    say(top ? "OK" : "none", "top=%llx", top);
}
static void c_env(char **a) {
    (void)a;
    int count = 0;
    for (char **e = environ; *e; e++) {
        count++;
        if (count < 60) note(*e);
    }
    say("OK", "count=%d %s", count, found);
}
static void c_args(char **a) {
    size_t bytes = 0;
    char hex[65] = "";
    int count = 0;
    for (; a[count + 1]; count++) bytes += strlen(a[count + 1]);
    for (int i = 0; count && a[1][i] && i < 32; i++) sprintf(hex + 2 * i, "%02x", (unsigned char)a[1][i]);
    say("OK", "count=%d bytes=%zu hex=%s", count, bytes, hex);
}
// no-argv PROGRAM: executes PROGRAM with an empty argument vector.
static void c_no_argv(char **a) {
    char *none[] = {NULL};
    execve(arg(a, 1), none, none);
    answer(-1);
}

// --- devices, terminals ---

static void c_mknod_open(char **a) {
    int type = arg(a, 2)[0] == 'b' ? S_IFBLK : S_IFCHR;
    unlink(arg(a, 1));
    dev_t dev = ((dev_t)number(arg(a, 3)) << 8) | number(arg(a, 4));
    if (mknod(a[1], type | 0666, dev) < 0) return say(verdict(-1), "step=mknod");
    int fd = open(a[1], O_RDONLY | O_NONBLOCK);
    say(verdict(fd), "step=open");
    unlink(a[1]);
}
static void c_tiocsti(char **a) {
    (void)a;
    int fds[4] = {0, 1, 2, open("/dev/tty", O_RDWR | O_NOCTTY)}, last = EBADF;
    for (int i = 0; i < 4; i++) {
        if (ioctl(fds[i], TIOCSTI, "!") == 0) return say("OK", "call=TIOCSTI fd=%d", i);
        int e = errno;
        // The kernel compares the low 32 bits only; a filter that looks at all 64 lets this one by.
        if (syscall(SYS_ioctl, fds[i], 0x100000000UL | TIOCSTI, "!") == 0) return say("OK", "call=TIOCSTI+high fd=%d", i);
        char sub = 6;
        if (ioctl(fds[i], TIOCLINUX, &sub) >= 0) return say("OK", "call=TIOCLINUX fd=%d", i);
        if (last != EPERM) last = e;
    }
    say(errname(last), "");
}
// on-pty CMD: runs CMD with a terminal of its own and says what keys it found pushed into it.
static void c_on_pty(char **a) {
    int master, slave;
    if (openpty(&master, &slave, NULL, NULL, NULL) < 0) return say(verdict(-1), "step=openpty");
    struct termios raw;
    tcgetattr(slave, &raw);
    cfmakeraw(&raw);
    tcsetattr(slave, TCSANOW, &raw);
    pid_t child = fork();
    if (child == 0) {
        login_tty(dup(slave));
        execv(arg(a, 1), a + 1);
        _exit(127);
    }
    int status;
    char out[4096] = "", keys[256] = "";
    size_t have = 0;
    for (long end = now_ms() + 10000; now_ms() < end;) {
        struct pollfd p = {master, POLLIN, 0};
        if (poll(&p, 1, 50) > 0 && have < sizeof out - 1) {
            ssize_t n = read(master, out + have, sizeof out - 1 - have);
            if (n > 0) have += n;
        } else if (waitpid(child, &status, WNOHANG) == child) {
            break;
        }
    }
    out[have] = 0;
    fcntl(slave, F_SETFL, O_NONBLOCK);
    tcsetattr(slave, TCSANOW, &raw);
    ssize_t n = read(slave, keys, sizeof keys - 1);
    keys[n > 0 ? n : 0] = 0;
    say(n > 0 ? "OK" : "none", "keys=%s said=%s", keys, out);
}

// --- other processes ---

static void c_kill(char **a) { answer(kill(number(arg(a, 1)), number(arg(a, 2)))); }
static void c_ptrace(char **a) {
    pid_t pid = number(arg(a, 1));
    long r = ptrace(PTRACE_ATTACH, pid, 0, 0);
    answer(r);
    if (r == 0) waitpid(pid, NULL, __WALL), ptrace(PTRACE_DETACH, pid, 0, 0);
}
static void c_pidfd(char **a) {
    int fd = syscall(SYS_pidfd_open, number(arg(a, 1)), 0);
    if (fd < 0) return say(verdict(fd), "step=open");
    long r = syscall(SYS_pidfd_getfd, fd, 1, 0);
    say(verdict(r), "step=getfd");
}
static void c_vm_read(char **a) {
    char text[64] = "";
    struct iovec here = {text, 32}, there = {(void *)strtoul(arg(a, 2), NULL, 16), 32};
    long r = syscall(SYS_process_vm_readv, number(arg(a, 1)), &here, 1, &there, 1, 0);
    int e = errno;
    char path[64];
    snprintf(path, sizeof path, "/proc/%s/mem", a[1]);
    int fd = open(path, O_RDONLY);
    errno = e;
    if (r >= 0 || fd < 0) return say(verdict(r), "text=%s", text);
    say("OK", "by=mem");
}
static void try_setns(int pid) {
    const char *kinds[] = {"cgroup", "ipc", "mnt", "net", "pid", "user", "uts", "time"};
    char path[64];
    for (int i = 0; i < 8; i++) {
        snprintf(path, sizeof path, "/proc/%d/ns/%s", pid, kinds[i]);
        int fd = open(path, O_RDONLY);
        if (fd < 0) continue;
        visited++;
        if (syscall(SYS_setns, fd, 0) == 0) note(path);
        close(fd);
    }
}
static void c_setns(char **a) {
    (void)a;
    each_pid(try_setns);
    int fd = syscall(SYS_pidfd_open, 1, 0);
    if (fd >= 0 && syscall(SYS_setns, fd, CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWUTS) == 0) note("pidfd");
    say(*found ? "OK" : "none", "links=%d found=%s", visited, found);
}
static int key_of(const char *tag) {
    unsigned h = 5381;
    while (*tag) h = h * 33 + (unsigned char)*tag++;
    return (h & 0x7fffffff) | 1;
}
static char *slashed(const char *tag) {
    static char text[128];
    snprintf(text, sizeof text, "/warren-%s", tag);
    return text;
}
static void c_sysv(char **a) {
    int id = shmget(key_of(arg(a, 1)), 0, 0);
    void *at = id < 0 ? (void *)-1 : shmat(id, NULL, SHM_RDONLY);
    say(verdict(at == (void *)-1 ? -1 : 0), "text=%s", at == (void *)-1 ? "" : (char *)at);
}
static void c_shm(char **a) { answer(shm_open(slashed(arg(a, 1)), O_RDONLY, 0)); }
static void c_mqueue(char **a) { answer(mq_open(slashed(arg(a, 1)), O_RDONLY | O_NONBLOCK)); }
static void c_key(char **a) {
    // Linking the user keyring in gives possession; searching it is what reads a neighbour's secret.
    long r = syscall(SYS_keyctl, 10 /* SEARCH */, KEYRING_USER, "user", slashed(arg(a, 1)), 0);
    answer(r);
}
static int abstract(const char *tag, struct sockaddr_un *at) {
    memset(at, 0, sizeof *at);
    at->sun_family = AF_UNIX;
    int n = snprintf(at->sun_path + 1, sizeof at->sun_path - 1, "warren-%s", tag);
    return offsetof(struct sockaddr_un, sun_path) + 1 + n;
}
static void c_abstract(char **a) {
    struct sockaddr_un at;
    int length = abstract(arg(a, 1), &at), fd = socket(AF_UNIX, SOCK_STREAM, 0);
    answer(fd < 0 ? fd : connect(fd, (void *)&at, length));
}
static void c_unix(char **a) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    strncpy(at.sun_path, arg(a, 1), sizeof at.sun_path - 1);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    answer(fd < 0 ? fd : connect(fd, (void *)&at, sizeof at));
}
static int dial(int type, const char *host, int port) {
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = htons(port)};
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_port = htons(port)};
    bool v4 = inet_pton(AF_INET, host, &four.sin_addr) == 1;
    if (!v4 && inet_pton(AF_INET6, host, &six.sin6_addr) != 1) return errno = EINVAL, -1;
    int fd = socket(v4 ? AF_INET : AF_INET6, type | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    int r = v4 ? connect(fd, (void *)&four, sizeof four) : connect(fd, (void *)&six, sizeof six);
    if (r == 0 || errno != EINPROGRESS) return r;
    struct pollfd p = {fd, POLLOUT, 0};
    if (poll(&p, 1, 2000) < 1) return errno = ETIMEDOUT, -1;
    socklen_t size = sizeof errno;
    int e = 0;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &size);
    return e ? (errno = e, -1) : 0;
}
static void c_tcp(char **a) { answer(dial(SOCK_STREAM, arg(a, 1), number(arg(a, 2)))); }
static void c_udp(char **a) { answer(dial(SOCK_DGRAM, arg(a, 1), number(arg(a, 2)))); }

// victim TAG PORT: owns one of everything that another process should not reach; ends when its
// standard input does, and takes everything away again.
static char memory[64];
static void c_victim(char **a) {
    const char *tag = arg(a, 1);
    char *path = slashed(tag);
    snprintf(memory, sizeof memory, "memory of %s", tag);
    int shm = shm_open(path, O_CREAT | O_RDWR, 0666);
    const char *shm_says = verdict(shm);
    struct mq_attr small = {.mq_maxmsg = 1, .mq_msgsize = 16};
    mode_t mask = umask(0);
    const char *mq_says = verdict(mq_open(path, O_CREAT | O_RDWR, 0666, &small));
    umask(mask);
    int sysv = shmget(key_of(tag), 4096, IPC_CREAT | 0666);
    const char *sysv_says = verdict(sysv);
    char *shared = sysv < 0 ? (void *)-1 : shmat(sysv, NULL, 0);
    if (shared != (void *)-1) strcpy(shared, memory);
    long key = syscall(SYS_add_key, "user", path, tag, strlen(tag), KEYRING_USER);
    const char *key_says = verdict(key);
    struct sockaddr_un un;
    int length = abstract(tag, &un), us = socket(AF_UNIX, SOCK_STREAM, 0);
    const char *un_says = verdict(bind(us, (void *)&un, length) < 0 ? -1 : listen(us, 8));
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_ANY), .sin_port = htons(number(arg(a, 2)))};
    int ts = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    setsockopt(ts, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    const char *tcp_says = verdict(bind(ts, (void *)&four, sizeof four) < 0 ? -1 : listen(ts, 8));
    socklen_t size = sizeof four;
    getsockname(ts, (void *)&four, &size);
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_addr = in6addr_any, .sin6_port = four.sin_port};
    int ss = socket(AF_INET6, SOCK_STREAM, 0);
    setsockopt(ss, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    setsockopt(ss, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    const char *tcp6_says = verdict(bind(ss, (void *)&six, sizeof six) < 0 ? -1 : listen(ss, 8));
    say("OK", "pid=%d addr=%lx port=%d shm=%s mqueue=%s sysv=%s key=%s abstract=%s tcp=%s tcp6=%s", getpid(),
        (unsigned long)memory, ntohs(four.sin_port), shm_says, mq_says, sysv_says, key_says, un_says, tcp_says, tcp6_says);
    char byte;
    while (read(0, &byte, 1) > 0) {}
    if (shm >= 0) shm_unlink(path);
    mq_unlink(path);
    if (sysv >= 0) shmctl(sysv, IPC_RMID, NULL);
    if (key >= 0) syscall(SYS_keyctl, 9 /* UNLINK */, key, KEYRING_USER);
}
// Lives until its standard input ends: keeps a sandbox for as long as the test holds the other end.
static void c_wait_eof(char **a) {
    (void)a;
    say("OK", "pid=%d", getpid());
    char byte;
    while (read(0, &byte, 1) > 0) {}
}

// --- privileges, mounts ---

static void c_whoami(char **a) {
    (void)a;
    char status[8192], sets[400] = "";
    slurp("/proc/self/status", status, sizeof status);
    for (char *line = strtok(status, "\n"); line; line = strtok(NULL, "\n"))
        if (!strncmp(line, "Cap", 3)) strcat(strcat(sets, line), " ");
    for (char *c = sets; *c; c++)
        if (*c == '\t') *c = ' ';
    say("OK", "uid=%d euid=%d gid=%d egid=%d %s", getuid(), geteuid(), getgid(), getegid(), sets);
}
static void c_exec(char **a) {
    execv(arg(a, 1), a + 1);
    answer(-1);
}
static void c_set_file_caps(char **a) {
    struct vfs_cap_data caps = {.magic_etc = VFS_CAP_REVISION_2 | VFS_CAP_FLAGS_EFFECTIVE, .data = {{1 << CAP_DAC_OVERRIDE | 1 << CAP_NET_RAW, 0}}};
    answer(setxattr(arg(a, 1), "security.capability", &caps, sizeof caps, 0));
}
static void c_setuid(char **a) {
    (void)a;
    long u = setuid(0), e = errno, g = setgid(0), h = setgroups(0, NULL);
    errno = e;
    say(u == 0 || g == 0 ? "OK" : errname(e), "uid=%ld gid=%ld groups=%ld", u, g, h);
}
static const struct { const char *name; unsigned long flag; } spaces[] = {
    {"user", CLONE_NEWUSER}, {"mnt", CLONE_NEWNS},   {"pid", CLONE_NEWPID}, {"net", CLONE_NEWNET},
    {"ipc", CLONE_NEWIPC},   {"uts", CLONE_NEWUTS}, {"cgroup", CLONE_NEWCGROUP}, {"time", 0x80}};
static unsigned long space(const char *which) {
    for (int i = 0; i < 8; i++)
        if (!strcmp(spaces[i].name, which)) return spaces[i].flag;
    _exit(2);
}
static void c_unshare(char **a) { answer(syscall(SYS_unshare, space(arg(a, 1)))); }
static void c_clone(char **a) {
    long pid = syscall(SYS_clone, space(arg(a, 1)) | SIGCHLD, 0, 0, 0, 0);
    if (pid == 0) _exit(0);
    answer(pid);
}
static void c_clone3(char **a) {
    struct { uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls; } args = {
        .flags = space(arg(a, 1)), .exit_signal = SIGCHLD};
    long pid = syscall(SYS_clone3, &args, sizeof args);
    if (pid == 0) _exit(0);
    answer(pid);
}
static void c_mount(char **a) { answer(mount("none", arg(a, 2), arg(a, 1), 0, NULL)); }
static void c_bind(char **a) { answer(mount(arg(a, 1), arg(a, 2), NULL, MS_BIND | MS_REC, NULL)); }
// By a user namespace of one's own, where mounting would be allowed.
static void c_userns_mount(char **a) {
    if (syscall(SYS_unshare, CLONE_NEWUSER | CLONE_NEWNS) < 0) return say(verdict(-1), "step=unshare");
    long r = mount("none", arg(a, 2), arg(a, 1), 0, NULL);
    say(verdict(r), "step=mount");
}
static void c_umount(char **a) { answer(umount2(arg(a, 1), MNT_DETACH)); }
static void c_remount_rw(char **a) {
    long r = mount("none", arg(a, 1), NULL, MS_REMOUNT | MS_BIND, NULL);
    if (r == 0) return say("OK", "by=mount");
    int e = errno;
    uint64_t attr[4] = {0, 1 /* MOUNT_ATTR_RDONLY */, 0, 0};
    r = syscall(SYS_mount_setattr, AT_FDCWD, a[1], 0, attr, sizeof attr);
    if (r == 0) return say("OK", "by=mount_setattr");
    say(errname(e), "setattr=%s", verdict(r));
}
// Every mount point that this process sees, tried one after another.
static void c_umount_all(char **a) {
    (void)a;
    static char text[1 << 18];
    slurp("/proc/self/mountinfo", text, sizeof text);
    for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
        char at[PATH_MAX];
        if (sscanf(line, "%*s %*s %*s %*s %4095s", at) != 1) continue;
        visited++;
        if (umount2(at, MNT_DETACH) == 0) note(at);
    }
    say(*found ? "OK" : "none", "mounts=%d found=%s", visited, found);
}
static void c_open_tree(char **a) { answer(syscall(SYS_open_tree, AT_FDCWD, arg(a, 1), 1 /* CLONE */ | O_CLOEXEC)); }
static void c_fsopen(char **a) { answer(syscall(SYS_fsopen, arg(a, 1), 0)); }
static void c_fifo(char **a) {
    (void)a;
    struct sched_param p = {.sched_priority = 1};
    answer(syscall(SYS_sched_setscheduler, 0, SCHED_FIFO, &p));
}
static void c_nice(char **a) {
    (void)a;
    answer(setpriority(PRIO_PROCESS, 0, -5));
}
// slow-pid PID: every call that takes time or room from a process of one's own user.
static void c_slow_pid(char **a) {
    pid_t pid = number(arg(a, 1));
    struct sched_param p = {0};
    struct rlimit high = {RLIM_INFINITY, RLIM_INFINITY};
    getrlimit(RLIMIT_CPU, &high);
    cpu_set_t all;
    sched_getaffinity(0, sizeof all, &all);
    if (syscall(SYS_sched_setscheduler, pid, SCHED_IDLE, &p) == 0) note("scheduler");
    if (syscall(SYS_sched_setaffinity, pid, sizeof all, &all) >= 0) note("affinity");
    if (setpriority(PRIO_PROCESS, pid, 19) == 0) note("priority");
    if (setpriority(PRIO_USER, 998, 19) == 0 && pid == 1) note("user-priority");
    if (syscall(SYS_ioprio_set, 1, pid, 3 << 13) == 0) note("ioprio");
    if (syscall(SYS_prlimit64, pid, RLIMIT_CPU, &high, NULL) == 0) note("limit");
    say(*found ? "OK" : "none", "found=%s", found);
}
static void c_slow_self(char **a) {
    char own[16];
    sprintf(own, "%d", getpid());
    char *args[] = {a[0], own, NULL};
    c_slow_pid(args);
}
// hide HOW MS: makes it hard for a supervisor to find this process, then sleeps.
static void c_hide(char **a) {
    char *how = arg(a, 1);
    struct rlimit none = {0, 0};
    if (!strcmp(how, "name")) prctl(PR_SET_NAME, "\xff\xfe) 1 (");
    if (!strcmp(how, "dumpable")) prctl(PR_SET_DUMPABLE, 0);
    if (!strcmp(how, "mark")) setrlimit(RLIMIT_LOCKS, &none);
    if (!strcmp(how, "high-mark")) {
        // A pointer whose lower half is zero.
        void *at = mmap((void *)(1UL << 32), 4096, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (at != MAP_FAILED) syscall(SYS_prlimit64, 0, RLIMIT_LOCKS, at, NULL);
    }
    nap(number(arg(a, 2)));
    say("OK", "");
}
static int take_terminals(long wanted, long *count) {
    struct rlimit most;
    getrlimit(RLIMIT_NOFILE, &most);
    most.rlim_cur = most.rlim_max;
    setrlimit(RLIMIT_NOFILE, &most);
    int fd = 0;
    for (*count = 0; *count < wanted && (fd = open("/dev/ptmx", O_RDWR | O_NOCTTY)) >= 0;) ++*count;
    return fd;
}
// terminals COUNT: opens as many as it gets.
static void c_terminals(char **a) {
    long count, fd = take_terminals(number(arg(a, 1)), &count);
    say(verdict(fd), "count=%ld", count);
}
static void c_raise_limits(char **a) {
    (void)a;
    for (int i = 0; i < RLIM_NLIMITS; i++) {
        struct rlimit was, more;
        if (getrlimit(i, &was) < 0 || was.rlim_max == RLIM_INFINITY) continue;
        visited++;
        more = was;
        more.rlim_max = was.rlim_max + 1;
        char text[32];
        sprintf(text, "%d", i);
        if (setrlimit(i, &more) == 0) note(text), setrlimit(i, &was);
    }
    say(*found ? "OK" : "none", "finite=%d raised=%s", visited, found);
}
static void c_oom_adj(char **a) {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY);
    answer(fd < 0 ? fd : write(fd, arg(a, 1), strlen(arg(a, 1))));
}
static int lock_memory(void) {
    void *at = mmap(NULL, 64 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return mlock(at, 64 << 20);
}
static void c_mlock(char **a) { (void)a, answer(lock_memory()); }

// --- the kernel's surface ---
// Each call is harmless if it is let through: wrong magic, a null pointer, a path that is not there.

static void c_sys(char **a) {
    const char *call = arg(a, 1);
    static char page[4096];
    struct perf_event_attr perf = {.type = PERF_TYPE_SOFTWARE, .size = sizeof perf, .config = PERF_COUNT_SW_CPU_CLOCK};
    const char *no = "/nonexistent";
#define CALL(text, ...) if (!strcmp(call, text)) return answer(syscall(__VA_ARGS__))
    CALL("io_uring_setup", SYS_io_uring_setup, 4, page);
    CALL("io_uring_enter", SYS_io_uring_enter, -1, 0, 0, 0, 0, 0);
    CALL("io_uring_register", SYS_io_uring_register, -1, 0, 0, 0);
    CALL("bpf", SYS_bpf, 0, page, 72);
    CALL("userfaultfd", SYS_userfaultfd, O_CLOEXEC | 1);
    CALL("keyctl", SYS_keyctl, 0, KEYRING_PROCESS, 1);
    CALL("add_key", SYS_add_key, "user", "warren-probe", "x", 1, KEYRING_PROCESS);
    CALL("request_key", SYS_request_key, "user", "warren-absent", NULL, 0);
    CALL("perf_event_open", SYS_perf_event_open, &perf, 0, -1, -1, 0);
    CALL("fanotify_init", SYS_fanotify_init, 0, 0);
    CALL("syslog", SYS_syslog, 10, NULL, 0);
    CALL("swapon", SYS_swapon, no, 0);
    CALL("swapoff", SYS_swapoff, no);
    CALL("reboot", SYS_reboot, 0, 0, 0, NULL);
    CALL("acct", SYS_acct, no);
    CALL("pivot_root", SYS_pivot_root, no, no);
    CALL("quotactl", SYS_quotactl, 0, no, 0, NULL);
    CALL("init_module", SYS_init_module, NULL, 0, "");
    CALL("finit_module", SYS_finit_module, -1, "", 0);
    CALL("delete_module", SYS_delete_module, NULL, 0);
    CALL("kexec_load", SYS_kexec_load, 0, 99, NULL, ~0UL);
    CALL("kexec_file_load", SYS_kexec_file_load, -1, -1, 0, NULL, ~0UL);
    CALL("iopl", SYS_iopl, 3);
    CALL("ioperm", SYS_ioperm, 0x80, 1, 1);
    CALL("ptrace", SYS_ptrace, PTRACE_TRACEME, 0, 0, 0);
    CALL("personality", SYS_personality, READ_IMPLIES_EXEC);
    CALL("modify_ldt", SYS_modify_ldt, 0, page, sizeof page);
    CALL("kcmp", SYS_kcmp, getpid(), getpid(), 1, 0, 0);
    CALL("settimeofday", SYS_settimeofday, (void *)8, NULL);
    CALL("clock_settime", SYS_clock_settime, CLOCK_REALTIME, (void *)8);
    CALL("clock_adjtime", SYS_clock_adjtime, CLOCK_REALTIME, (void *)8);
    CALL("sethostname", SYS_sethostname, page, -1);
    CALL("setdomainname", SYS_setdomainname, page, -1);
    CALL("open_by_handle_at", SYS_open_by_handle_at, -1, page, 0);
    CALL("process_vm_writev", SYS_process_vm_writev, getppid(), NULL, 0, NULL, 0, 0);
    CALL("setns", SYS_setns, -1, 0);
    CALL("chroot", SYS_chroot, no);
    CALL("mount", SYS_mount, no, no, no, 0, 0);
    CALL("umount2", SYS_umount2, no, 0);
    CALL("fsopen", SYS_fsopen, no, 0);
    CALL("fsmount", SYS_fsmount, -1, 0, 0);
    CALL("fsconfig", SYS_fsconfig, -1, 0, 0, 0, 0);
    CALL("fspick", SYS_fspick, AT_FDCWD, no, 0);
    CALL("move_mount", SYS_move_mount, AT_FDCWD, no, AT_FDCWD, no, 0);
    CALL("open_tree", SYS_open_tree, AT_FDCWD, no, 0);
    CALL("mount_setattr", SYS_mount_setattr, AT_FDCWD, no, 0, page, 32);
    CALL("memfd_secret", 447, 0);
    CALL("native", SYS_getpid);
    _exit(2);
}
static void c_int80(char **a) {
    (void)a;
    long r;
    __asm__ volatile("int $0x80" : "=a"(r) : "a"(20) : "memory", "r8", "r9", "r10", "r11"); // getpid of i386
    say(r < 0 ? errname(-r) : "OK", "value=%ld", r);
}
static void c_x32(char **a) {
    (void)a;
    answer(syscall(0x40000000 | SYS_getpid));
}
// numbers LOW HIGH: the one answer that all these numbers give, or the first that differs from it.
static void c_numbers(char **a) {
    int first = -1;
    for (long nr = number(arg(a, 1)); nr <= number(arg(a, 2)); nr++) {
        int e = syscall(nr, -1, -1, -1, -1, -1, -1) < 0 ? errno : 0;
        if (first < 0) first = e;
        if (e != first) return say("mixed", "%s, then %ld gives %s", errname(first), nr, errname(e));
    }
    say(errname(first), "");
}
static void c_socket(char **a) { answer(socket(number(arg(a, 1)), number(arg(a, 2)), number(arg(a, 3)))); }
// Every family from 0 to 50 with every type: which can be made at all.
static void c_families(char **a) {
    (void)a;
    for (int f = 0; f <= 50; f++) {
        bool made = false;
        for (int type = 1; type <= 5 && !made; type++) {
            int fd = socket(f, type, 0);
            made = fd >= 0;
            if (made) close(fd);
        }
        char text[16];
        sprintf(text, "%d", f);
        if (made) note(text);
    }
    say("OK", "made= %s", found);
}
static void c_netlink(char **a) {
    (void)a;
    for (int protocol = 0; protocol < 32; protocol++) {
        int fd = socket(AF_NETLINK, SOCK_RAW, protocol);
        char text[16];
        sprintf(text, "%d", protocol);
        if (fd >= 0) note(text), close(fd);
    }
    say("OK", "made= %s", found);
}

// --- resources ---

// forks MOST: children that wait, until fork refuses or MOST are there.
static void c_forks(char **a) {
    long most = number(arg(a, 1)), count = 0;
    int e = 0;
    pid_t group = fork();
    if (group == 0) {
        setpgid(0, 0);
        for (; count < most; count++) {
            pid_t pid = fork();
            if (pid == 0) pause();
            if (pid < 0) {
                e = errno;
                break;
            }
        }
        say(errname(e), "count=%ld", count);
        kill(0, SIGKILL);
    }
    if (group < 0) return say(verdict(-1), "count=0");
    waitpid(group, NULL, 0);
}
// A bomb that does not count: every process forks for ever.
static void c_bomb(char **a) {
    (void)a;
    signal(SIGCHLD, SIG_IGN);
    for (;;) fork();
}
// Who is bounded by the kernel, and by nobody who has to look, need not be waited for: the last argument `hurry`.
static int hurry = 1;
static void in_hurry(char **a, int i) {
    if (a[i] && !strcmp(a[i], "hurry")) hurry = 20;
}
static void linger(long ms) {
    nap(ms / hurry);
}
// By steps of 4 MiB, and slowly enough that whoever watches can act.
static int touch(size_t bytes, int sharing) {
    for (size_t done = 0; done < bytes; done += 4 << 20, linger(5)) {
        char *at = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) return -1;
        for (int i = 0; i < 4 << 20; i += 4096) at[i] = 1;
    }
    return 0;
}
// eat MIB PROCS [hurry]: touches MIB of memory, shared out among PROCS processes that hold it for a second.
static void c_eat(char **a) {
    long mib = number(arg(a, 1)), procs = number(arg(a, 2)), killed = 0;
    in_hurry(a, 3);
    if (procs == 1) {
        int r = touch(mib << 20, MAP_PRIVATE);
        answer(r);
        linger(1000);
        return;
    }
    for (int i = 0; i < procs; i++)
        if (fork() == 0) {
            touch((mib << 20) / procs, MAP_PRIVATE);
            linger(1500);
            _exit(0);
        }
    for (int i = 0, status; i < procs; i++)
        if (wait(&status) > 0 && WIFSIGNALED(status)) killed++;
    say(killed ? "killed" : "OK", "killed=%ld", killed);
    if (killed) _exit(9);
}
// eat-hidden KIND MIB [hurry]: memory that is no process's own: shared, or in a memfd or SysV segment that none maps.
static void c_eat_hidden(char **a) {
    static char block[1 << 20];
    memset(block, 1, sizeof block);
    long mib = number(arg(a, 2)), done = 0;
    in_hurry(a, 3);
    int fd = -1;
    if (!strcmp(arg(a, 1), "memfd")) {
        fd = memfd_create("hidden", 0);
        if (fd < 0) return say(verdict(-1), "mib=0");
        for (; done < mib; done++) {
            if (write(fd, block, sizeof block) != sizeof block) return say(verdict(-1), "mib=%ld", done);
            linger(5);
        }
    } else if (!strcmp(a[1], "shared")) {
        if (touch(mib << 20, MAP_SHARED) < 0) return say(verdict(-1), "");
        done = mib;
    } else if (!strcmp(a[1], "dropped")) {
        // The pages stay in the segment; that nobody has them mapped is all that the process sees to.
        for (; done < mib; done += 4, linger(5)) {
            char *at = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            if (at == MAP_FAILED) return say(verdict(-1), "mib=%ld", done);
            for (int i = 0; i < 4 << 20; i += 4096) at[i] = 1;
            madvise(at, 4 << 20, MADV_DONTNEED);
        }
    } else {
        int ids[256], count = 0;
        for (; done < mib && count < 256; done += 8) {
            int id = ids[count++] = shmget(IPC_PRIVATE, 8 << 20, IPC_CREAT | 0600);
            char *at = id < 0 ? (void *)-1 : shmat(id, NULL, 0);
            if (at == (void *)-1) return say(verdict(-1), "mib=%ld", done);
            for (long i = 0; i < 8 << 20; i += 4096) at[i] = 1;
            shmdt(at);
            linger(40);
        }
        linger(1000);
        while (count) shmctl(ids[--count], IPC_RMID, NULL);
    }
    linger(1000);
    say("OK", "mib=%ld", done);
}
// fill MIB DIR...: writes to all directories in turn until each refuses or MIB are written in all.
static void c_fill(char **a) {
    static char block[1 << 18];
    memset(block, 'x', sizeof block);
    long most = number(arg(a, 1)) << 20, total = 0;
    int fds[32], open_ones = 0, count = 0;
    long each[32] = {0};
    int last = 0;
    for (; a[count + 2] && count < 32; count++) {
        char path[PATH_MAX];
        snprintf(path, sizeof path, "%s/fill", a[count + 2]);
        fds[count] = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (fds[count] >= 0) open_ones++;
    }
    int tried = open_ones;
    while (open_ones && total < most)
        for (int i = 0; i < count; i++) {
            if (fds[i] < 0) continue;
            ssize_t n = write(fds[i], block, sizeof block);
            if (n > 0) {
                total += n, each[i] += n;
            } else {
                last = errno;
                close(fds[i]);
                fds[i] = -1;
                open_ones--;
            }
        }
    for (int i = 0; i < count; i++) {
        char text[PATH_MAX + 32];
        snprintf(text, sizeof text, "%s:%ld", a[i + 2], each[i]);
        note(text);
    }
    say(open_ones ? "OK" : errname(last), "total=%ld opened=%d each=%s", total, tried, found);
}
static void c_many_files(char **a) {
    long most = number(arg(a, 2)), count = 0;
    char path[PATH_MAX];
    for (; count < most; count++) {
        snprintf(path, sizeof path, "%s/%ld", arg(a, 1), count);
        int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
        if (fd < 0) return say(verdict(fd), "count=%ld", count);
        close(fd);
    }
    say("OK", "count=%ld", count);
}
static void c_open_many(char **a) {
    (void)a;
    int count = 3;
    while (dup(1) >= 0) count++;
    int e = errno;
    for (int fd = 3; fd < count; fd++) close(fd);
    say(errname(e), "count=%d", count);
}
// hoard PROCS: that many processes, each with every descriptor it can get, at the same time.
static void c_hoard(char **a) {
    long procs = number(arg(a, 1)), count = 0;
    pid_t pids[1000];
    for (; count < procs && (pids[count] = fork()) >= 0; count++)
        if (pids[count] == 0) {
            while (open("/dev/null", O_RDONLY) >= 0) {}
            pause();
        }
    nap(1000);
    say("OK", "processes=%ld", count);
    for (int i = 0; i < count; i++) kill(pids[i], SIGKILL);
}
static void c_deep(char **a) {
    long levels = number(arg(a, 2)), done = 0;
    char dir[201];
    memset(dir, 'd', 200);
    dir[200] = 0;
    if (chdir(arg(a, 1)) < 0) return answer(-1);
    for (; done < levels; done++)
        if (mkdir(dir, 0700) < 0 || chdir(dir) < 0) break;
    const char *ended = verdict(done == levels ? 0 : -1);
    chmod(".", 0);
    say(ended, "levels=%ld", done);
}
static int zombies;
static void see_zombie(int pid) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (slurp(path, text, sizeof text) < 0) return;
    char *end = strrchr(text, ')');
    if (end && end[2] == 'Z') zombies++;
}
// orphans N: N processes whose parent is gone before they end, then counts the zombies.
static void c_orphans(char **a) {
    long most = number(arg(a, 1)), made = 0;
    while (made < most) {
        pid_t pid = fork();
        if (pid == 0) {
            pid_t orphan = fork();
            if (orphan == 0) nap(30);
            _exit(orphan < 0);
        }
        int status = 1;
        if (pid > 0) waitpid(pid, &status, 0);
        if (pid < 0 || status) nap(20);
        else made++;
    }
    // Not before the last of them is dead: one that sleeps is no zombie yet.
    for (long end = now_ms() + 3000; nap(100), now_ms() < end;) {
        zombies = 0;
        each_pid(see_zombie);
        if (!zombies) break;
    }
    say("OK", "orphans=%ld zombies=%d", made, zombies);
}
static void c_zombie(char **a) {
    (void)a;
    if (fork() == 0) _exit(0);
    nap(100);
    each_pid(see_zombie);
    say("OK", "zombies=%d", zombies);
}
static void deafen(void) {
    for (int s = 1; s < 65; s++) signal(s, SIG_IGN);
}
// daemon TAG: leaves a process behind that nothing but SIGKILL ends.
static void c_daemon(char **a) {
    (void)arg(a, 1);
    int ready[2];
    if (pipe(ready) < 0) return answer(-1);
    if (fork() == 0) {
        setsid();
        pid_t pid = fork();
        if (pid) _exit(0);
        deafen();
        pid = getpid();
        if (write(ready[1], &pid, sizeof pid) < 0) _exit(1);
        for (int fd = 0; fd < 64; fd++) close(fd);
        for (;;) pause();
    }
    pid_t pid = 0;
    if (read(ready[0], &pid, sizeof pid) < 0) return answer(-1);
    say("OK", "pid=%d", pid);
}
// stubborn N: N stopped children, and a parent that hears no signal either.
static void c_stubborn(char **a) {
    deafen();
    for (int i = 0; i < number(arg(a, 1)); i++)
        if (fork() == 0) {
            setsid();
            for (;;) raise(SIGSTOP);
        }
    nap(200);
    say("OK", "pid=%d", getpid());
    for (;;) pause();
}
static void burn(long ms) {
    for (long end = now_ms() + ms; now_ms() < end;)
        for (volatile int i = 0; i < 100000; i++) {}
}
static void c_spin(char **a) {
    long ms = number(arg(a, 1));
    burn(ms);
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    say("OK", "cpu_ms=%ld wall_ms=%ld", t.tv_sec * 1000 + t.tv_nsec / 1000000, ms);
}
static void c_spin_tree(char **a) {
    for (int i = 0; i < number(arg(a, 1)); i++)
        if (fork() == 0) burn(number(arg(a, 2))), _exit(0);
    while (wait(NULL) > 0) {}
    say("OK", "");
}
// Short-lived processes, none of which lives long enough to reach a limit of its own.
static void c_spin_relay(char **a) {
    for (long end = now_ms() + number(arg(a, 1)); now_ms() < end;) {
        pid_t pid = fork();
        if (pid == 0) burn(100), _exit(0);
        if (pid > 0) waitpid(pid, NULL, 0);
    }
    say("OK", "");
}
static void c_sleep(char **a) {
    nap(number(arg(a, 1)));
    say("OK", "");
}
static void c_flood(char **a) {
    static char block[1 << 16];
    memset(block, 'y', sizeof block);
    int fd = number(arg(a, 2));
    long most = number(arg(a, 1)) << 20, done = 0;
    while (done < most) {
        ssize_t n = write(fd, block, most - done < (long)sizeof block ? (size_t)(most - done) : sizeof block);
        if (n <= 0) break;
        done += n;
    }
}
static void c_lines(char **a) {
    char line[64];
    for (long i = 0; i < number(arg(a, 1)); i++) {
        int n = snprintf(line, sizeof line, "%07ld\n", i);
        if (write(1, line, n) != n || write(2, line, n) != n) return;
    }
}
static void c_all_bytes(char **a) {
    unsigned char bytes[256];
    for (int i = 0; i < 256; i++) bytes[i] = i;
    for (int i = 0; i < number(arg(a, 1)); i++)
        if (write(1, bytes, 256) != 256) return;
}

// --- what the kernel has so much of for each user ---

static void hold(void) {
    char byte;
    while (read(0, &byte, 1) > 0) {}
}
static void c_inotify(char **a) { (void)a, answer(inotify_init1(0)); }
// Each `hold-*` takes all it can get, says how much that was and what refused the next, and keeps it.
static void c_hold_inotify(char **a) {
    (void)a;
    int count = 0;
    while (inotify_init1(0) >= 0) count++;
    say(errname(errno), "count=%d", count);
    hold();
}
static int queue_signal(void) {
    union sigval none = {0};
    return sigqueue(getpid(), SIGRTMIN, none);
}
static void block_signal(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGRTMIN);
    sigprocmask(SIG_BLOCK, &set, NULL);
}
static void c_queue_signal(char **a) {
    (void)a;
    block_signal();
    answer(queue_signal());
}
static void c_hold_signals(char **a) {
    (void)a;
    block_signal();
    long count = 0;
    while (queue_signal() == 0) count++;
    say(errname(errno), "count=%ld", count);
    hold();
}
static int pipe_size(void) {
    int ends[2];
    return pipe(ends) < 0 ? -1 : fcntl(ends[0], F_GETPIPE_SZ);
}
static void c_pipe(char **a) {
    (void)a;
    int size = pipe_size();
    say(verdict(size), "size=%d", size);
}
// hold-terminals COUNT: so many, or as many as there are.
static void c_hold_terminals(char **a) {
    long count, fd = take_terminals(number(arg(a, 1)), &count);
    say(verdict(fd), "count=%ld", count);
    hold();
}
// hold-priority: every way to come before others, taken for a process that is never idle.
static void c_hold_priority(char **a) {
    (void)a;
    struct sched_param first = {.sched_priority = 1};
    if (setpriority(PRIO_PROCESS, 0, -5) == 0) note("nice");
    if (syscall(SYS_sched_setscheduler, 0, SCHED_FIFO, &first) == 0) note("fifo");
    if (lock_memory() == 0) note("locked");
    int score = open("/proc/self/oom_score_adj", O_WRONLY);
    if (score >= 0 && write(score, "-500", 4) == 4) note("spared");
    pid_t busy = fork();
    if (busy == 0)
        for (;;) {}
    say(*found ? "OK" : "none", "pid=%d found=%s", busy, found);
    hold();
    kill(busy, SIGKILL);
}
// hold-pipes PROCS: until a pipe is smaller than it should be, or no process has a descriptor left.
static void c_hold_pipes(char **a) {
    int report[2], least = 1 << 30, size;
    if (pipe(report) < 0) return answer(-1);
    long procs = number(arg(a, 1));
    for (int i = 0; i < procs; i++)
        if (fork() == 0) {
            close(report[0]);
            int smallest = 1 << 30;
            for (int pipe; (pipe = pipe_size()) > 0;)
                if (pipe < smallest) smallest = pipe;
            if (write(report[1], &smallest, sizeof smallest) < 0) _exit(1);
            pause();
        }
    for (int i = 0; i < procs && read(report[0], &size, sizeof size) == sizeof size; i++)
        if (size < least) least = size;
    say("OK", "least=%d", least);
    hold();
    kill(0, SIGKILL);
}
static int watch(int many, int by) {
    struct epoll_event event = {.events = EPOLLIN};
    return epoll_ctl(by, EPOLL_CTL_ADD, many, &event);
}
static void c_epoll(char **a) {
    (void)a;
    int ends[2];
    answer(pipe(ends) < 0 ? -1 : watch(ends[0], epoll_create1(0)));
}
// hold-epoll PROCS: every descriptor watched by every other half of them, in that many processes.
static void c_hold_epoll(char **a) {
    int report[2], e = 0;
    long procs = number(arg(a, 1)), total = 0, count;
    struct { long count; int error; } one;
    if (pipe(report) < 0) return answer(-1);
    for (int i = 0; i < procs; i++)
        if (fork() == 0) {
            int fds[4096], n = 0, ends[2];
            struct rlimit most;
            getrlimit(RLIMIT_NOFILE, &most);
            for (int half = most.rlim_cur / 2; n < half && n < 4096 && pipe(ends) == 0; n += 2)
                fds[n] = ends[0], fds[n + 1] = ends[1];
            one.count = one.error = 0;
            for (int by; !one.error && (by = epoll_create1(0)) >= 0;)
                for (int k = 0; k < n; k++)
                    if (watch(fds[k], by) == 0) one.count++;
                    else if (errno != EPERM) one.error = errno, k = n;
            if (write(report[1], &one, sizeof one) < 0) _exit(1);
            pause();
        }
    for (count = 0; count < procs && read(report[0], &one, sizeof one) == sizeof one; count++)
        total += one.count, e = one.error ? one.error : e;
    say(errname(e), "count=%ld", total);
    hold();
    kill(0, SIGKILL);
}
// storm DIR MS: writes and syncs for so long; says how many bytes were on their way to a disk.
static void c_storm(char **a) {
    static char block[1 << 16];
    char path[PATH_MAX], text[1024];
    snprintf(path, sizeof path, "%s/storm", arg(a, 1));
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (fd < 0) return answer(-1);
    long rounds = 0;
    for (long end = now_ms() + number(arg(a, 2)); now_ms() < end; rounds++) {
        if (pwrite(fd, block, sizeof block, rounds % 64 * sizeof block) < 0 || fsync(fd) < 0) return answer(-1);
        sync_file_range(fd, 0, 0, 0);
    }
    sync();
    unlink(path);
    if (slurp("/proc/self/io", text, sizeof text) < 0) return answer(-1);
    char *line = strstr(text, "\nwrite_bytes: ");
    say("OK", "rounds=%ld disk_bytes=%ld", rounds, line ? number(line + 14) : -1);
}
// look-up DIR COUNT: names that are not there; the kernel remembers each of them.
static void c_look_up(char **a) {
    char path[PATH_MAX];
    struct stat s;
    for (long i = 0; i < number(arg(a, 2)); i++) {
        snprintf(path, sizeof path, "%s/absent-%ld", arg(a, 1), i);
        stat(path, &s);
    }
    say("OK", "");
}

// --- more of life and death ---

static char state_of(pid_t pid) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    if (slurp(path, text, sizeof text) < 0) return '?';
    char *end = strrchr(text, ')');
    return end ? end[2] : '?';
}
// stuck traced|stopped: a parent in vfork, which no signal but KILL reaches, and a child that never goes on.
static void c_stuck(char **a) {
    int report[2];
    if (pipe(report) < 0) return answer(-1);
    bool traced = !strcmp(arg(a, 1), "traced");
    pid_t parent = fork();
    if (parent == 0) {
        deafen();
        if (vfork() == 0) {
            pid_t own = getpid();
            if (traced && ptrace(PTRACE_TRACEME, 0, 0, 0) < 0) own = -errno;
            if (write(report[1], &own, sizeof own) < 0) _exit(1);
            signal(SIGSTOP, SIG_DFL);
            for (;;) raise(SIGSTOP);
        }
        for (;;) pause();
    }
    pid_t child = 0;
    if (read(report[0], &child, sizeof child) < 0 || child < 0) return say(errname(-child), "");
    nap(200);
    say("OK", "parent=%c child=%c", state_of(parent), state_of(child));
    for (;;) pause();
}
// crash as-is|lowered: dies so that a core would be written, with the limit as it is or as 0.
static void c_crash(char **a) {
    struct rlimit none = {0, 0};
    if (!strcmp(arg(a, 1), "lowered")) {
        void *low = mmap((void *)0x100000000UL, 4096, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
        if (low == MAP_FAILED) _exit(4);
        memcpy(low, &none, sizeof none);
        syscall(SYS_setrlimit, RLIMIT_CORE, &none);
        syscall(SYS_prlimit64, 0, RLIMIT_CORE, &none, NULL);
        syscall(SYS_prlimit64, 0, 0xdead00000000UL | RLIMIT_CORE, &none, NULL);
        syscall(SYS_prlimit64, getpid(), RLIMIT_CORE, low, NULL);
    }
    struct rlimit now;
    getrlimit(RLIMIT_CORE, &now);
    say("OK", "soft=%ld hard=%ld", (long)now.rlim_cur, (long)now.rlim_max);
    signal(SIGABRT, SIG_DFL);
    abort();
}

// dead-fuse DIR: a file system on DIR that takes every question about a name and answers none, until EOF.
static void c_dead_fuse(char **a) {
    static char request[1 << 20];
    char options[128];
    int dev = open("/dev/fuse", O_RDWR);
    if (dev < 0) return say(verdict(-1), "step=open");
    snprintf(options, sizeof options, "fd=%d,rootmode=40755,user_id=0,group_id=0,allow_other", dev);
    if (mount("dead", arg(a, 1), "fuse", 0, options) < 0) return say(verdict(-1), "step=mount");
    for (bool ready = false;;) {
        struct pollfd p[2] = {{dev, POLLIN, 0}, {0, POLLIN, 0}};
        if (poll(p, 2, -1) < 0 || p[1].revents) break;
        ssize_t n = read(dev, request, sizeof request);
        if (n < (ssize_t)sizeof(struct fuse_in_header)) continue;
        struct fuse_in_header *in = (void *)request;
        struct { struct fuse_out_header head; union { struct fuse_init_out init; struct fuse_attr_out attr; } body; } out;
        memset(&out, 0, sizeof out);
        out.head.unique = in->unique;
        out.head.len = sizeof out.head;
        if (in->opcode == FUSE_INIT) {
            out.body.init.major = FUSE_KERNEL_VERSION, out.body.init.minor = 31, out.body.init.max_write = 4096;
            out.head.len += sizeof out.body.init;
        } else if (in->opcode == FUSE_GETATTR) {
            out.body.attr.attr_valid = 3600;
            out.body.attr.attr.ino = 1, out.body.attr.attr.mode = S_IFDIR | 0755, out.body.attr.attr.nlink = 2;
            out.head.len += sizeof out.body.attr;
        } else if (in->opcode == FUSE_LOOKUP || in->opcode == FUSE_FORGET || in->opcode == FUSE_INTERRUPT) {
            continue;
        } else {
            out.head.error = -ENOSYS;
        }
        if (write(dev, &out, out.head.len) < 0 && errno != ENOENT) break;
        if (!ready) say("OK", ""), ready = true;
    }
    umount2(a[1], MNT_DETACH);
}
// filters PID FILE: writes the seccomp programs of a process to FILE.0, FILE.1 and so on, the newest first.
static void c_filters(char **a) {
    static unsigned char program[4096 * 8];
    char path[PATH_MAX];
    pid_t pid = number(arg(a, 1));
    if (ptrace(PTRACE_ATTACH, pid, 0, 0) < 0) return say(verdict(-1), "step=attach");
    waitpid(pid, NULL, __WALL);
    long count = 0, length, e;
    for (; (length = ptrace(0x420c /* PTRACE_SECCOMP_GET_FILTER */, pid, count, program)) > 0; count++) {
        snprintf(path, sizeof path, "%s.%ld", arg(a, 2), count);
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        if (write(fd, program, length * 8) != length * 8) _exit(3);
        close(fd);
    }
    e = errno;
    ptrace(PTRACE_DETACH, pid, 0, 0);
    say(count ? "OK" : errname(e), "count=%ld", count);
}

// --- layers and descriptors ---

static void c_setxattr_as(char **a) {
    answer(setxattr(arg(a, 1), arg(a, 2), arg(a, 3), strlen(arg(a, 3)), 0));
}
static void c_whiteout(char **a) { answer(mknod(arg(a, 1), S_IFCHR | 0600, makedev(0, 0))); }
static int unix_socket(const char *path, struct sockaddr_un *at) {
    *at = (struct sockaddr_un){.sun_family = AF_UNIX};
    strncpy(at->sun_path, path, sizeof at->sun_path - 1);
    return socket(AF_UNIX, SOCK_STREAM, 0);
}
// give-fd SOCKET FILE: passes an open FILE to whoever connects.
static void c_give_fd(char **a) {
    struct sockaddr_un at;
    int by = unix_socket(arg(a, 1), &at), file = open(arg(a, 2), O_RDONLY);
    if (file < 0 || bind(by, (void *)&at, sizeof at) < 0 || chmod(a[1], 0777) < 0 || listen(by, 8) < 0)
        return answer(-1);
    say("OK", "");
    for (;;) {
        struct pollfd p[2] = {{by, POLLIN, 0}, {0, POLLIN, 0}};
        if (poll(p, 2, -1) < 0 || p[1].revents) break;
        int to = accept(by, NULL, NULL);
        char space[CMSG_SPACE(sizeof file)] = "";
        struct iovec byte = {"x", 1};
        struct msghdr message = {.msg_iov = &byte, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
        struct cmsghdr *head = CMSG_FIRSTHDR(&message);
        head->cmsg_level = SOL_SOCKET, head->cmsg_type = SCM_RIGHTS, head->cmsg_len = CMSG_LEN(sizeof file);
        memcpy(CMSG_DATA(head), &file, sizeof file);
        sendmsg(to, &message, 0);
        close(to);
    }
    unlink(a[1]);
}
// take-fd SOCKET: connects, takes a descriptor and reads from it.
static void c_take_fd(char **a) {
    struct sockaddr_un at;
    int from = unix_socket(arg(a, 1), &at), file = -1;
    if (connect(from, (void *)&at, sizeof at) < 0) return say(verdict(-1), "step=connect");
    char space[CMSG_SPACE(sizeof file)] = "", got[1], text[256] = "";
    struct iovec byte = {got, 1};
    struct msghdr message = {.msg_iov = &byte, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    if (recvmsg(from, &message, 0) < 0) return say(verdict(-1), "step=receive");
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    if (!head || head->cmsg_type != SCM_RIGHTS) return say("none", "step=receive");
    memcpy(&file, CMSG_DATA(head), sizeof file);
    ssize_t n = pread(file, text, sizeof text - 1, 0);
    say(verdict(n), "text=%s", text);
}

static const struct { const char *name; void (*run)(char **); } cases[] = {
    {"inotify", c_inotify}, {"hold-inotify", c_hold_inotify}, {"queue-signal", c_queue_signal},
    {"hold-signals", c_hold_signals}, {"pipe", c_pipe}, {"hold-pipes", c_hold_pipes}, {"epoll", c_epoll},
    {"hold-terminals", c_hold_terminals}, {"hold-priority", c_hold_priority},
    {"hold-epoll", c_hold_epoll}, {"storm", c_storm}, {"look-up", c_look_up}, {"stuck", c_stuck}, {"crash", c_crash},
    {"filters", c_filters}, {"dead-fuse", c_dead_fuse},
    {"setxattr-as", c_setxattr_as}, {"whiteout", c_whiteout}, {"give-fd", c_give_fd}, {"take-fd", c_take_fd},
    {"read", c_read}, {"write", c_write}, {"append", c_append}, {"put", c_put}, {"rewrite", c_rewrite},
    {"truncate", c_truncate}, {"chmod", c_chmod}, {"chown", c_chown}, {"unlink", c_unlink}, {"mkdir", c_mkdir},
    {"rename", c_rename}, {"link", c_link}, {"setxattr", c_setxattr}, {"stat", c_stat}, {"list", c_list},
    {"cwd", c_cwd}, {"walk-up", c_walk_up}, {"chroot-out", c_chroot_out}, {"by-handle", c_by_handle},
    {"moved-cwd", c_moved_cwd}, {"writable-below", c_writable_below}, {"uname", c_uname}, {"copy", c_copy},
    {"fds", c_fds}, {"with-fds", c_with_fds}, {"with-stdin", c_with_stdin}, {"read-at", c_read_at},
    {"foreign-fds", c_foreign_fds}, {"groups-by-init", c_groups_by_init}, {"find-in-proc", c_find_in_proc}, {"pids", c_pids},
    {"write-any-exe", c_write_any_exe}, {"kallsyms", c_kallsyms}, {"env", c_env}, {"args", c_args},
    {"no-argv", c_no_argv}, {"mknod-open", c_mknod_open}, {"tiocsti", c_tiocsti}, {"on-pty", c_on_pty},
    {"kill", c_kill}, {"ptrace", c_ptrace}, {"pidfd", c_pidfd}, {"vm-read", c_vm_read}, {"setns", c_setns},
    {"sysv", c_sysv}, {"shm", c_shm}, {"mqueue", c_mqueue}, {"key", c_key}, {"abstract", c_abstract},
    {"unix", c_unix}, {"tcp", c_tcp}, {"udp", c_udp}, {"victim", c_victim}, {"wait-eof", c_wait_eof},
    {"whoami", c_whoami}, {"exec", c_exec}, {"set-file-caps", c_set_file_caps}, {"setuid", c_setuid},
    {"unshare", c_unshare}, {"clone", c_clone}, {"clone3", c_clone3}, {"mount", c_mount}, {"bind", c_bind},
    {"userns-mount", c_userns_mount}, {"umount", c_umount}, {"remount-rw", c_remount_rw},
    {"umount-all", c_umount_all}, {"open-tree", c_open_tree}, {"fsopen", c_fsopen}, {"fifo", c_fifo},
    {"nice", c_nice}, {"slow-pid", c_slow_pid}, {"slow-self", c_slow_self}, {"hide", c_hide},
    {"terminals", c_terminals}, {"raise-limits", c_raise_limits}, {"oom-adj", c_oom_adj}, {"mlock", c_mlock},
    {"sys", c_sys}, {"int80", c_int80}, {"x32", c_x32}, {"numbers", c_numbers}, {"socket", c_socket},
    {"families", c_families}, {"netlink", c_netlink}, {"forks", c_forks}, {"bomb", c_bomb}, {"eat", c_eat},
    {"eat-hidden", c_eat_hidden}, {"fill", c_fill}, {"many-files", c_many_files}, {"open-many", c_open_many},
    {"hoard", c_hoard}, {"deep", c_deep}, {"orphans", c_orphans}, {"zombie", c_zombie}, {"daemon", c_daemon},
    {"stubborn", c_stubborn}, {"spin", c_spin}, {"spin-tree", c_spin_tree}, {"spin-relay", c_spin_relay},
    {"sleep", c_sleep}, {"flood", c_flood}, {"lines", c_lines}, {"all-bytes", c_all_bytes}};

static void run(char **a) {
    name = a[0];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(cases[i].name, a[0])) return cases[i].run(a);
    dprintf(2, "probe: no case `%s`\n", a[0]);
    _exit(2);
}

int main(int argc, char **argv) {
    (void)argc;
    char **a = argv + 1;
    if (!*a) return 2;
    // `exec` and its like take the rest of the line, `+` included.
    if (!strcmp(*a, "direct")) return run(a + 1), 0;
    // `--victim TAG PORT` keeps a victim beside the cases, as the control of what another one hides.
    pid_t victim = 0;
    int hold[2];
    if (!strcmp(*a, "--victim") && pipe(hold) == 0) {
        victim = fork();
        if (victim == 0) {
            dup2(hold[0], 0);
            close(hold[1]);
            char *only[] = {"victim", a[1], a[2], NULL};
            run(only);
            _exit(0);
        }
        close(hold[0]);
        nap(300);
        a += 3;
    }
    int failed = 0;
    while (*a) {
        char **end = a;
        while (*end && strcmp(*end, "+")) end++;
        bool more = *end;
        *end = NULL;
        name = a[0];
        pid_t pid = fork();
        if (pid == 0) {
            run(a);
            _exit(0);
        }
        int status;
        if (pid < 0) {
            say(verdict(-1), "step=fork");
        } else if (waitpid(pid, &status, 0) == pid && WIFSIGNALED(status)) {
            say("killed", "signal=%d", WTERMSIG(status));
        } else if (WEXITSTATUS(status)) {
            failed = WEXITSTATUS(status);
        }
        a = more ? end + 1 : end;
    }
    if (victim) close(hold[1]), waitpid(victim, NULL, 0);
    return failed;
}
