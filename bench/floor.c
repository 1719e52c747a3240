// The floor: what the kernel charges for a sandbox like Warren's, and nothing else.
//
//   floor [OPTIONS] -- CMD...       one sandbox, one command, as a program
//   floor --loop N -- CMD...        N sandboxes from one resident process; prints ns of each
//   floor --seconds S --parallel P  as many as P resident processes make in S seconds; prints how many per second
//   floor --agent N -- CMD...       one sandbox whose PID 1 starts CMD N times; prints ns of each
//   floor --freeze N --tasks T --rest MS
//                                   N times the bare freezer write until T tasks are frozen, and until they run, each after a rest;
//                                   prints both in ns
//   floor --join FILE -- CMD...     no sandbox: CMD in the mount namespace FILE
//
//   --root DIR      the lower layer of the root                      --cgroups    with memory, cpu, pids and freezer groups
//   --filter FILE   a seccomp program; may be given more than once
//
// All namespaces, ids of its own, an overlay on a tmpfs, pivot_root, /proc, /dev, /tmp, no capabilities, no new privileges,
// Landlock, seccomp. Needs root. An error ends it with 125: a floor that lacks a layer would flatter nobody but itself.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/landlock.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { FIRST_ID = 0x60000000, RANGE = 65536, WORKLOAD = 1000, MAX_FILTERS = 4 };

static const char *root_dir;
static int with_cgroups;
static char **command;
static struct sock_fprog filters[MAX_FILTERS];
static int filter_count;
static int rest_ms;
static int outer_end = -1;

static void fail(const char *what) {
    fprintf(stderr, "floor: cannot %s: %s\n", what, strerror(errno));
    _exit(125);
}

static void check(long result, const char *what) {
    if (result < 0) fail(what);
}

static long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

static void put(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    check(fd, path);
    check(write(fd, text, strlen(text)), path);
    close(fd);
}

// --- Control groups ---------------------------------------------------------------------------------------------------------

// A v1 controller, its limit, and where it is. On a host with v2 alone there is one group for all of them.
static struct controller {
    const char *base, *file, *value;
    char path[96];
} groups[] = {
    {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "536870912", ""},
    {"/sys/fs/cgroup/cpu", "cpu.shares", "1024", ""},
    {"/sys/fs/cgroup/pids", "pids.max", "65", ""},
    {"/sys/fs/cgroup/freezer", NULL, NULL, ""},
};
enum { GROUPS = sizeof groups / sizeof *groups };
static const struct { const char *file, *value; } v2_limits[] = {{"memory.max", "536870912"}, {"cpu.weight", "100"}, {"pids.max", "65"}};
static int is_v2;

static void make_groups(int number) {
    static char path[160];
    is_v2 = access("/sys/fs/cgroup/cgroup.controllers", F_OK) == 0;
    for (int i = 0; i < (is_v2 ? 1 : GROUPS); i++) {
        struct controller *group = &groups[i];
        snprintf(group->path, sizeof group->path, "%s/floor-%d-%d", is_v2 ? "/sys/fs/cgroup" : group->base, getpid(), number);
        check(mkdir(group->path, 0755), group->path);
        if (is_v2) {
            for (size_t k = 0; k < sizeof v2_limits / sizeof *v2_limits; k++) {
                snprintf(path, sizeof path, "%s/%s", group->path, v2_limits[k].file);
                put(path, v2_limits[k].value);
            }
        } else if (group->file) {
            snprintf(path, sizeof path, "%s/%s", group->path, group->file);
            put(path, group->value);
        }
    }
}

// By the process itself, and not by cgroup.procs: else the kernel waits for an RCU grace period.
static void join_groups(void) {
    static char path[160];
    for (int i = 0; !is_v2 && i < GROUPS; i++) {
        snprintf(path, sizeof path, "%s/tasks", groups[i].path);
        put(path, "0");
    }
}

static void remove_groups(void) {
    for (int i = 0; i < (is_v2 ? 1 : GROUPS); i++)
        while (rmdir(groups[i].path) < 0)
            if (errno == EBUSY) usleep(50);
            else fail(groups[i].path);
}

// --- Inside ----------------------------------------------------------------------------------------------------------------

static void build_root(void) {
    static char options[128];
    check(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "make the mounts private");
    // By descriptor: the lower layer may be below /tmp, which is only a place and vanishes with the old root.
    int lower = open(root_dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    check(lower, root_dir);
    check(mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=100m,nr_inodes=50000,mode=755"), "mount a tmpfs");
    check(chdir("/tmp"), "enter the tmpfs");
    static const char *const made[] = {"upper", "work", "root", "tmp"};
    for (int i = 0; i < 4; i++) check(mkdir(made[i], 0755), made[i]);
    check(chmod("tmp", 01777), "open /tmp to all");
    snprintf(options, sizeof options, "lowerdir=/proc/self/fd/%d,upperdir=upper,workdir=work,userxattr", lower);
    check(mount("overlay", "root", "overlay", MS_NOSUID | MS_NODEV, options), "mount the overlay");
    check(mount("tmp", "root/tmp", NULL, MS_BIND, NULL), "bind /tmp");
    check(mount("proc", "root/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=invisible"), "mount /proc");
    static const char *const devices[] = {"null", "zero", "full", "random", "urandom", "tty"};
    for (int i = 0; i < 6; i++) {
        static char from[32], to[32];
        snprintf(from, sizeof from, "/dev/%s", devices[i]);
        snprintf(to, sizeof to, "root/dev/%s", devices[i]);
        check(mount(from, to, NULL, MS_BIND, NULL), from);
    }
    check(mount("devpts", "root/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666"), "mount /dev/pts");
    check(chdir("root"), "enter the root");
    check(syscall(SYS_pivot_root, ".", "."), "pivot");
    check(umount2(".", MNT_DETACH), "detach the old root");
    check(chdir("/"), "enter /");
}

static void allow(int rules, const char *path, unsigned long rights) {
    struct landlock_path_beneath_attr rule = {.allowed_access = rights, .parent_fd = open(path, O_PATH | O_CLOEXEC)};
    check(rule.parent_fd, path);
    check(syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &rule, 0), "add a Landlock rule");
    close(rule.parent_fd);
}

static void install(const struct sock_fprog *filter) {
    check(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, filter), "install the filter");
}

static void lock_down(void) {
    for (int cap = 0; prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) == 0; cap++) {}
    check(syscall(SYS_setresgid, WORKLOAD, WORKLOAD, WORKLOAD), "setresgid");
    check(syscall(SYS_setresuid, WORKLOAD, WORKLOAD, WORKLOAD), "setresuid");
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct none[2] = {0};
    check(syscall(SYS_capset, &header, none), "drop the capabilities");
    check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "forbid new privileges");
    // Every right that the first version of Landlock knows; reading everywhere, writing in places.
    unsigned long all = (1 << 13) - 1, reading = 1 | 1 << 2 | 1 << 3;
    struct landlock_ruleset_attr attr = {.handled_access_fs = all};
    int rules = syscall(SYS_landlock_create_ruleset, &attr, sizeof attr.handled_access_fs, 0);
    check(rules, "make Landlock rules");
    allow(rules, "/", reading);
    static const char *const writable[] = {"/tmp", "/dev", "/proc"};
    for (int i = 0; i < 3; i++) allow(rules, writable[i], all);
    check(syscall(SYS_landlock_restrict_self, rules, 0), "restrict by Landlock");
    close(rules);
    for (int i = 0; i < filter_count; i++) install(&filters[i]);
}

// PID 1 that starts a command for each byte it reads and answers when it ended.
static void serve(int socket) {
    char byte;
    close(outer_end);
    while (read(socket, &byte, 1) == 1) {
        pid_t child = vfork();
        if (child == 0) {
            execv(command[0], command);
            _exit(125);
        }
        int status;
        check(waitpid(child, &status, 0), "wait");
        byte = status ? 1 : 0;
        if (write(socket, &byte, 1) != 1) break;
    }
    _exit(0);
}

// --- Outside ---------------------------------------------------------------------------------------------------------------

static pid_t launch(int number, int agent) {
    static char path[64], map[64];
    int go[2];
    check(pipe2(go, O_CLOEXEC), "make a pipe");
    if (with_cgroups) make_groups(number);
    struct clone_args args = {
        .flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS,
        .exit_signal = SIGCHLD,
    };
    int group = -1;
    if (with_cgroups && is_v2) {
        group = open(groups[0].path, O_PATH | O_DIRECTORY | O_CLOEXEC);
        check(group, groups[0].path);
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = group;
    }
    pid_t child = syscall(SYS_clone3, &args, sizeof args);
    check(child, "create the namespaces");
    if (child == 0) {
        char byte;
        close(go[1]);
        if (with_cgroups) join_groups();
        if (read(go[0], &byte, 1) != 1) _exit(125);
        check(setgroups(0, NULL), "leave the groups");
        check(syscall(SYS_setresgid, 0, 0, 0), "setresgid");
        check(syscall(SYS_setresuid, 0, 0, 0), "setresuid");
        check(unshare(CLONE_NEWCGROUP), "create the cgroup namespace");
        check(sethostname("floor", 5), "set the host name");
        build_root();
        lock_down();
        if (agent >= 0) serve(agent);
        execv(command[0], command);
        fail(command[0]);
    }
    if (group >= 0) close(group);
    snprintf(map, sizeof map, "0 %d %d\n", FIRST_ID + (child % 4096) * RANGE, RANGE);
    snprintf(path, sizeof path, "/proc/%d/uid_map", child);
    put(path, map);
    snprintf(path, sizeof path, "/proc/%d/gid_map", child);
    put(path, map);
    close(go[0]);
    check(write(go[1], "", 1), "let the child go");
    close(go[1]);
    return child;
}

static int one(int number) {
    int status;
    pid_t child = launch(number, -1);
    check(waitpid(child, &status, 0), "wait");
    if (with_cgroups) remove_groups();
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void loop(int count) {
    for (int i = 0; i < count; i++) {
        long start = now();
        if (one(i)) _exit(125);
        printf("%ld\n", now() - start);
    }
}

static void parallel(int seconds, int workers) {
    int counts[2];
    check(pipe(counts), "make a pipe");
    long start = now(), end = start + seconds * 1000000000L;
    for (int i = 0; i < workers; i++)
        if (fork() == 0) {
            int made = 0;
            for (; now() < end; made++)
                if (one(made)) _exit(125);
            check(write(counts[1], &made, sizeof made), "report");
            _exit(0);
        }
    close(counts[1]);
    int total = 0, made, reports = 0;
    while (read(counts[0], &made, sizeof made) == sizeof made) total += made, reports++;
    if (reports != workers) _exit(125);
    printf("%.1f\n", total * 1e9 / (now() - start));
}

static void agent(int count) {
    int ends[2];
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), "make a socket");
    outer_end = ends[0];
    pid_t child = launch(0, ends[1]);
    close(ends[1]);
    int failed = 0;
    for (int i = 0; i < count && !failed; i++) {
        char byte = 0;
        long start = now();
        failed = write(ends[0], &byte, 1) != 1 || read(ends[0], &byte, 1) != 1 || byte;
        printf("%ld\n", now() - start);
    }
    close(ends[0]);
    check(waitpid(child, NULL, 0), "wait");
    if (with_cgroups) remove_groups();
    if (failed) _exit(125);
}

// Writes to cgroup.freeze and waits until cgroup.events says so, in the v2 hierarchy, with controllers or without.
static void freeze(int count, int tasks) {
    static char group[96], path[160], text[256];
    const char *base = access("/sys/fs/cgroup/cgroup.procs", F_OK) == 0 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/unified";
    snprintf(group, sizeof group, "%s/floor-%d", base, getpid());
    check(mkdir(group, 0755), group);
    pid_t children[1024];
    for (int i = 0; i < tasks && i < 1024; i++) {
        children[i] = fork();
        if (children[i] == 0) for (;;) pause();
        snprintf(path, sizeof path, "%s/cgroup.procs", group);
        snprintf(text, sizeof text, "%d", children[i]);
        put(path, text);
    }
    snprintf(path, sizeof path, "%s/cgroup.freeze", group);
    int freezer = open(path, O_WRONLY);
    snprintf(path, sizeof path, "%s/cgroup.events", group);
    int events = open(path, O_RDONLY);
    check(freezer, "open cgroup.freeze");
    check(events, "open cgroup.events");
    for (int i = 0; i < count; i++)
        for (int frozen = 1; frozen >= 0; frozen--) {
            // As whoever is measured beside it does: a CPU that sleeps wakes up late.
            usleep(rest_ms * 1000);
            long start = now();
            check(pwrite(freezer, frozen ? "1" : "0", 1, 0), "write cgroup.freeze");
            for (const char *wanted = frozen ? "frozen 1" : "frozen 0";;) {
                ssize_t length = pread(events, text, sizeof text - 1, 0);
                check(length, "read cgroup.events");
                text[length] = 0;
                if (strstr(text, wanted)) break;
                sched_yield();
            }
            printf("%s%ld%s", frozen ? "" : " ", now() - start, frozen ? "" : "\n");
        }
    for (int i = 0; i < tasks && i < 1024; i++) {
        kill(children[i], SIGKILL);
        waitpid(children[i], NULL, 0);
    }
    while (rmdir(group) < 0 && errno == EBUSY) usleep(50);
}

static void load(const char *file) {
    static struct sock_filter programs[MAX_FILTERS][BPF_MAXINSNS];
    if (filter_count == MAX_FILTERS) errno = E2BIG, fail(file);
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    check(fd, file);
    ssize_t length = read(fd, programs[filter_count], sizeof *programs);
    check(length, file);
    close(fd);
    filters[filter_count] = (struct sock_fprog){.len = length / sizeof **programs, .filter = programs[filter_count]};
    filter_count++;
}

int main(int argc, char **argv) {
    int loops = 0, agents = 0, freezes = 0, tasks = 10, seconds = 0, workers = 1;
    const char *join = NULL;
    for (int i = 1; i < argc; i++) {
        const char *option = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(option, "--")) { command = argv + i + 1; break; }
        if (!strcmp(option, "--cgroups")) { with_cgroups = 1; continue; }
        i++;
        if (!strcmp(option, "--root")) root_dir = value;
        else if (!strcmp(option, "--filter")) load(value);
        else if (!strcmp(option, "--join")) join = value;
        else if (!strcmp(option, "--loop")) loops = atoi(value);
        else if (!strcmp(option, "--agent")) agents = atoi(value);
        else if (!strcmp(option, "--freeze")) freezes = atoi(value);
        else if (!strcmp(option, "--tasks")) tasks = atoi(value);
        else if (!strcmp(option, "--rest")) rest_ms = atoi(value);
        else if (!strcmp(option, "--seconds")) seconds = atoi(value);
        else if (!strcmp(option, "--parallel")) workers = atoi(value);
        else return fprintf(stderr, "floor: unknown option %s\n", option), 2;
    }
    if (freezes) return freeze(freezes, tasks), 0;
    if (!command || !*command) return fprintf(stderr, "floor: no command\n"), 2;
    if (join) {
        int fd = open(join, O_RDONLY | O_CLOEXEC);
        check(fd, join);
        check(setns(fd, CLONE_NEWNS), "join the mount namespace");
        execvp(command[0], command);
        fail(command[0]);
    }
    if (!root_dir) return fprintf(stderr, "floor: no --root\n"), 2;
    if (loops) loop(loops);
    else if (agents) agent(agents);
    else if (seconds) parallel(seconds, workers);
    else return one(0);
    return 0;
}
