//! What walls refuse to a command that is followed, and that it does not notice.

use warren::{Denial, Explain};

use super::*;

fn followed(id: &str) -> ExecOptions {
    ExecOptions { explain: Explain::Host, ..named(id) }
}

fn python(script: &str) -> Command {
    Command::new("python3").args(["-c", script])
}

#[track_caller]
fn find<'a>(denials: &'a [Denial], what: &str) -> &'a Denial {
    let found = denials.iter().find(|denial| denial.what == what);
    found.unwrap_or_else(|| panic!("`{what}` is not among {denials:#?}"))
}

/// Tries what walls refuse, then what only permissions and absence do.
const ATTEMPTS: &str = r#"
import ctypes, os, socket, sys
hidden, shown = sys.argv[1:]
libc = ctypes.CDLL(None)
def attempt(what):
    try: what()
    except OSError: return
    raise SystemExit("it was not refused")
def dial(address):
    with socket.socket() as s: s.connect(address)
def ask():
    with socket.socket(type=socket.SOCK_DGRAM) as s:
        s.connect(("127.0.0.1", 53)); s.settimeout(10)
        s.send(bytes([0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 6]) + b"warren\7example\0\0\1\0\1")
        if s.recv(512)[3] == 5: raise OSError("refused")
for i in range(3): attempt(lambda: open(hidden))
attempt(lambda: os.mkdir("/usr/lib/warren-x"))
attempt(lambda: open(shown + "/file", "a"))
os.chdir(shown)
attempt(lambda: os.mkdir("below"))
os.chdir("/")
attempt(lambda: open("/etc/warren-x", "w"))
attempt(lambda: dial(("169.254.169.254", 80)))
attempt(ask)
libc.mount(b"a", b"/tmp", b"tmpfs", 0, None)
libc.ptrace(16, 1, 0, 0)
files = []
def many():
    while True: files.append(open("/dev/null"))
attempt(many)
del files[:]
# No wall's:
if os.path.exists("/workspace/closed"): os.remove("/workspace/closed")
with open("/workspace/closed", "w"): pass
os.chmod("/workspace/closed", 0)
attempt(lambda: open("/workspace/closed"))
attempt(lambda: open("/tmp/absent/file"))
attempt(lambda: open("/usr/absent"))
attempt(lambda: open("/etc/warren-absent"))
attempt(lambda: dial(("127.0.0.1", 9)))
attempt(lambda: os.mkdir("/usr/bin"))
attempt(lambda: os.kill(99999, 0))
attempt(lambda: os.setuid(0))
"#;

/// Does what might confuse one who follows: forks, executes, is stopped, dies by signals, changes what it
/// asks for while it asks, and leaves something behind.
const CONFUSION: &str = r#"
import ctypes, os, signal, sys, threading, time
libc = ctypes.CDLL(None)
first = os.fork()
if first == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.05)
        os._exit(0)
    os._exit(0)
os.waitpid(first, 0)
ends = 0
for i in range(1000):
    pid = os.fork()
    if pid == 0:
        if i % 50 == 0: os.execv("/bin/sh", ["sh", "-c", "exit 3"])
        if i % 50 == 1: os.kill(os.getpid(), signal.SIGKILL)
        os._exit(i % 3)
    ends += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
path = ctypes.create_string_buffer(64)
racing = True
def race():
    while racing:
        path.raw = b"/usr/aaaa".ljust(64, b"\0")
        path.raw = b"x" * 64
        path.raw = b"/etc/bbbb".ljust(64, b"\0")
racer = threading.Thread(target=race)
racer.start()
for i in range(200): libc.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
racing = False
racer.join()
for odd in (1, 2**63, 2**64 - 8): libc.open(ctypes.c_void_p(odd), 0)
pid = os.fork()
if pid == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(7)
stopped = os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])
os.kill(pid, signal.SIGCONT)
print(ends, stopped, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
for i in range(200):
    try: os.mkdir("/usr/" + "z" * 200 + str(i))
    except OSError as error: sys.stderr.write(str(error.errno))
print("done", flush=True)
if os.fork() == 0:
    time.sleep(20)
    os._exit(0)
os.kill(os.getpid(), signal.SIGTERM)
"#;

mod linux {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn each_wall_is_told_with_its_grant_and_what_is_no_walls_is_not() {
        let mut place = Place::new(ResourceLimits::default());
        let shown = tempfile::tempdir().unwrap();
        std::fs::write(shown.path().join("file"), "").unwrap();
        let shown = shown.path().to_str().unwrap().to_owned();
        // Every host has one, and no sandbox: not where the sandbox itself could have put it.
        let hidden = "/etc/shadow".to_owned();
        place.spec.allowed_paths_ro = vec![shown.clone().into()];
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let command = Command::new("python3").args(["-c", ATTEMPTS, &hidden, &shown]);
        let exec = start(&*sandbox, &command, &followed("walls")).await;
        let end = exec.wait().await.unwrap();
        let said = text(&*exec, LogStream::Stderr).await;
        assert_eq!(end.exit_code, 0, "everything was refused: {said}");
        for (wall, what, errno, count, grant) in [
            ("mount", format!("read {hidden}"), "ENOENT", 3, Some(format!("--ro {hidden}"))),
            (
                "mount",
                "create /usr/lib/warren-x".to_owned(),
                "EROFS",
                1,
                Some("--bind SRC:/usr/lib".to_owned()),
            ),
            (
                "mount",
                format!("write {shown}/file"),
                "EROFS",
                1,
                Some(format!("--rw {shown}/file")),
            ),
            ("mount", format!("create {shown}/below"), "EROFS", 1, Some(format!("--rw {shown}"))),
            (
                "landlock",
                "create /etc/warren-x".to_owned(),
                "EACCES",
                1,
                Some("--bind SRC:/etc/warren-x".to_owned()),
            ),
            ("network", "reach 169.254.169.254 port 80".to_owned(), "ENETUNREACH", 1, None),
            (
                "network",
                "look up warren.example".to_owned(),
                "REFUSED",
                1,
                Some("--allow-net warren.example".to_owned()),
            ),
            ("seccomp", "call mount".to_owned(), "EPERM", 1, None),
            (
                "seccomp",
                "call ptrace".to_owned(),
                "EPERM",
                1,
                Some("--seccomp permissive".to_owned()),
            ),
            (
                "limits",
                "more than 256 open files".to_owned(),
                "EMFILE",
                1,
                Some("--open-files 512".to_owned()),
            ),
        ] {
            let told = find(&end.denials, &what);
            let seen = (told.wall.as_str(), told.errno.as_deref(), told.count, &told.grant);
            assert_eq!(seen, (wall, Some(errno), count, &grant), "{what}");
        }
        for other in ["closed", "absent", "127.0.0.1", "/usr/bin", "setuid", "kill", "clone3"] {
            let told = end.denials.iter().find(|denial| denial.what.contains(other));
            assert_eq!(told, None, "no wall refused {other}");
        }
        // Whoever may not know the host hears of the same walls, and not of what the host has.
        let inside = ExecOptions { explain: Explain::Inside, ..named("inside") };
        let exec = start(&*sandbox, &command, &inside).await;
        let inside = exec.wait().await.unwrap().denials;
        find(&inside, "create /usr/lib/warren-x");
        assert!(!inside.iter().any(|denial| denial.what.contains(&hidden)), "{inside:#?}");
        // Nobody asked: nothing is told, and nothing is followed.
        let exec = start(&*sandbox, &command, &named("alone")).await;
        assert_eq!(exec.wait().await.unwrap().denials, []);
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_followed_command_ends_and_writes_as_it_does_alone() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let mut seen = Vec::new();
        for options in [named("alone"), followed("followed")] {
            let exec = start(&*sandbox, &python(CONFUSION), &options).await;
            let end = exec.wait().await.unwrap();
            let (out, err) = (LogStream::Stdout, LogStream::Stderr);
            let written = (text(&*exec, out).await, text(&*exec, err).await);
            seen.push((end.cause, end.exit_code, written));
            assert!(end.denials.len() <= 65, "{}", end.denials.len());
            assert_eq!(end.denials.is_empty(), options.explain == Explain::Nothing);
        }
        assert_eq!(seen[0], seen[1]);
        assert_eq!(seen[0].0, ExecCause::Signalled { signal: 15 }, "{:?}", seen[0]);
        assert!(seen[0].2.0.ends_with("True 7\ndone\n"), "control: it came to its end");
        assert_eq!(run(&*sandbox, "echo on").await.1, "on\n", "init goes on");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_followed_command_is_ended_with_all_it_started_when_its_time_is_up() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let command =
            sh("touch /usr/x; (setsid sleep 60 &); sleep 60").timeout(Duration::from_millis(500));
        let exec = start(&*sandbox, &command, &followed("late")).await;
        let end = exec.wait().await.unwrap();
        assert_eq!(end.cause, ExecCause::TimedOut);
        find(&end.denials, "create /usr/x");
        let left = run(&*sandbox, "pgrep -c sleep").await.1;
        assert_eq!(left, "0\n", "nothing of it is left");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_followed_command_is_answered_and_sends_itself_is_what_it_is_alone() {
        // Refused by init's filter, by its own, and in either way that programs do without.
        let script = "import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
def call(*args):
    ctypes.set_errno(0)
    return libc.syscall(*args), ctypes.get_errno()
print(call(165, 0, 0, 0, 0, 0), call(101, 16, 1, 0, 0), call(435, 0, 0), call(1000), call(41, 38, 5, 0))
print(call(39)[1], call(-1), call(0x40000000 | 39))
caught = []
signal.signal(signal.SIGSYS, lambda number, frame: caught.append(number))
os.kill(os.getpid(), signal.SIGSYS)
print(caught, call(165, 0, 0, 0, 0, 0), len(caught))
print('all', flush=True)
signal.signal(signal.SIGSYS, signal.SIG_DFL)
os.kill(os.getpid(), signal.SIGSYS)";
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let mut seen = Vec::new();
        for options in [named("alone"), followed("followed")] {
            let exec = start(&*sandbox, &python(script), &options).await;
            let end = exec.wait().await.unwrap();
            seen.push((end.cause, text(&*exec, LogStream::Stdout).await));
        }
        assert_eq!(seen[0], seen[1]);
        assert_eq!(seen[0].0, ExecCause::Signalled { signal: 31 }, "control: {:?}", seen[0]);
        assert!(seen[0].1.starts_with("(-1, 1) (-1, 1) (-1, 38) (-1, 38) (-1, 97)"), "{seen:?}");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_a_followed_command_leaves_behind_goes_on_and_is_refused_the_same() {
        let script = "import ctypes, os, sys, time
if os.fork() == 0:
    time.sleep(0.7)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount(0, 0, 0, 0, 0)
    with open('/tmp/left', 'w') as file: print(ctypes.get_errno(), file=file)
    os._exit(os.system('echo started >> /tmp/left'))";
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let exec = start(&*sandbox, &python(script), &followed("first")).await;
        assert_eq!(exec.wait().await.unwrap().exit_code, 0);
        assert_eq!(run(&*sandbox, "test ! -e /tmp/left").await.0.exit_code, 0, "control");
        tokio::time::sleep(Duration::from_millis(2000)).await;
        assert_eq!(run(&*sandbox, "cat /tmp/left").await.1, "1\nstarted\n");
        assert_eq!(run(&*sandbox, "pgrep -c python").await.1, "0\n", "and it ended");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_command_that_can_kill_its_follower_ends_with_it_and_is_let_through_nothing() {
        let script = "import os, time
os.kill(-1, 9)
time.sleep(0.5)
with open('/tmp/on', 'w') as file: print('on', file=file)";
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let exec = start(&*sandbox, &python(script), &followed("kills")).await;
        let cause = exec.wait().await.unwrap().cause;
        // It shares its user with its follower where the sandbox has one user alone.
        let expected = match rustix::process::geteuid().is_root() {
            true => ExecCause::Exited { code: 0 },
            false => ExecCause::Signalled { signal: 9 },
        };
        assert_eq!(cause, expected);
        assert_eq!(run(&*sandbox, "echo on").await.1, "on\n", "init goes on");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_was_refused_while_nobody_was_there_is_told_to_the_next() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let exec = start(&*sandbox, &sh("sleep 0.3; touch /usr/x"), &followed("alone")).await;
        let anchor = sandbox.anchor().unwrap();
        drop((exec, sandbox, backend));
        tokio::time::sleep(Duration::from_millis(600)).await;
        let backend = place.backend();
        let sandbox = backend.adopt(&place.id, &place.spec, &anchor).await.unwrap().unwrap();
        let exec = sandbox.find_exec(&ExecId("alone".to_owned())).await.unwrap().unwrap();
        find(&exec.wait().await.unwrap().denials, "create /usr/x");
        sandbox.destroy().await.unwrap();
    }
}

#[tokio::test]
async fn a_backend_that_cannot_explain_says_so() {
    let backend = warren::backend::FakeBackend::new();
    let sandbox = backend.create_sandbox(&SandboxSpec::default()).await.unwrap();
    let command = sh("true");
    let asked = sandbox.start_exec(&command, &ExecContext::default(), &followed("x")).await;
    assert_eq!(asked.unwrap_err().code(), "unsupported");
}
