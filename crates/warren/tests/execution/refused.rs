//! System calls that the filter refuses and names that nobody knows: told of every command that fails, followed or not.

use warren::Denial;

use super::*;

fn python(script: &str) -> Command {
    Command::new("python3").args(["-c", script])
}

/// Makes calls that are refused, from two threads, and says what the kernel answered.
const REFUSED: &str = r#"
import ctypes, os, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def mount():
    libc.mount(b"a", b"/tmp", b"tmpfs", 0, None)
    print("mount", ctypes.get_errno(), flush=True)
def family():
    libc.socket(38, 5, 0)
    print("socket", ctypes.get_errno(), flush=True)
mount()
for attempt in (mount, family):
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
# What programs find out by asking is not told.
libc.syscall(1000)
print("young", ctypes.get_errno())
sys.exit(int(sys.argv[1]))
"#;

/// Asks for what is refused from everywhere at once, for ever.
const SPAM: &str = r#"
import ctypes, os, threading
libc = ctypes.CDLL(None)
def spam():
    while True: libc.mount(b"a", b"/tmp", b"tmpfs", 0, None)
for i in range(4):
    if os.fork() == 0: break
for i in range(6): threading.Thread(target=spam).start()
print("spams", flush=True)
"#;

/// Asks for a name as often as is said, and says what was answered.
const NAME: &str = r#"
import socket, sys
name, times, code = sys.argv[1:]
labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
question = bytes([0, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0]) + labels + bytes([0, 0, 28, 0, 1])
for i in range(int(times)):
    with socket.socket(type=socket.SOCK_DGRAM) as s:
        s.connect(("127.0.0.1", 53)); s.settimeout(10); s.send(question)
        answer = s.recv(512)
print(answer[:2] == question[:2], answer[3], answer[12:] == question[12:])
sys.exit(int(code))
"#;

/// Sends what is no question, as fast as it can, and then one that is.
const NO_QUESTIONS: &str = r#"
import os, socket
with socket.socket(type=socket.SOCK_DGRAM) as s:
    s.connect(("127.0.0.1", 53))
    for i in range(20000): s.send(os.urandom(i % 600))
try: socket.getaddrinfo("after.example", 80)
except OSError: raise SystemExit(1)
"#;

fn told(denials: &[Denial]) -> Vec<(&str, Option<&str>, u32)> {
    denials.iter().map(|one| (one.what.as_str(), one.errno.as_deref(), one.count)).collect()
}

/// Fails if something takes longer than anybody would wait for it.
async fn soon<T>(what: &str, work: impl Future<Output = T>) -> T {
    let done = tokio::time::timeout(Duration::from_secs(10), work).await;
    done.unwrap_or_else(|_| panic!("{what} takes for ever"))
}

mod linux {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn the_calls_that_were_refused_to_a_command_that_fails_are_told() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        for (code, expected) in [
            (3, vec![("call mount", Some("EPERM"), 2), ("call socket", Some("EAFNOSUPPORT"), 1)]),
            // It lives with it.
            (0, vec![]),
        ] {
            let code = code.to_string();
            let command = Command::new("python3").args(["-c", REFUSED, &code]);
            let exec = start(&*sandbox, &command, &named(&code)).await;
            let end = exec.wait().await.unwrap();
            let said = text(&*exec, LogStream::Stdout).await;
            let answers = "mount 1\nmount 1\nsocket 97\nyoung 38\n";
            assert_eq!((end.exit_code.to_string(), said.as_str()), (code, answers));
            assert_eq!(told(&end.denials), expected);
            assert!(end.denials.iter().all(|one| one.wall == "seccomp"), "{:?}", end.denials);
        }
        let (end, _) = run(&*sandbox, "cat /etc/absent").await;
        assert_eq!((end.exit_code, end.denials), (1, vec![]), "no call was refused");
        let chmod = python("import os; os.chmod('/workspace', 0o4755)");
        let report = sandbox.exec_report(&chmod, &ExecContext::default()).await.unwrap();
        let denials = report.denials;
        assert!(denials.len() == 1 && denials[0].what.contains("chmod"), "{denials:?}");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_refused_call_is_told_of_the_command_that_made_it_and_of_no_other() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let idle = start(&*sandbox, &sh("read x; exit 3"), &named("idle")).await;
        let chroot =
            "import ctypes, time; time.sleep(float(sleep)); ctypes.CDLL(None).chroot(b'/')";
        // What it left behind makes the call when it is gone.
        let left = format!(
            "import os; sleep = 1 if os.fork() == 0 else 0\nif sleep == 0: os._exit(4)\n{chroot}"
        );
        let left = start(&*sandbox, &python(&left), &named("left")).await.wait().await.unwrap();
        assert_eq!((left.exit_code, left.denials), (4, vec![]));
        let own = format!("sleep = 0\n{chroot}\nraise SystemExit(5)");
        let own = start(&*sandbox, &python(&own), &named("own")).await.wait().await.unwrap();
        assert_eq!(
            (own.exit_code, told(&own.denials)),
            (5, vec![("call chroot", Some("EPERM"), 1)])
        );
        tokio::time::sleep(Duration::from_millis(1500)).await;
        let later = run(&*sandbox, "exit 6").await.0;
        assert_eq!((later.exit_code, later.denials), (6, vec![]));
        idle.kill().await.unwrap();
        assert_eq!(idle.wait().await.unwrap().denials, []);
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_names_that_a_command_that_fails_asked_for_are_told() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let ask = |code: &str| Command::new("python3").args(["-c", NAME, "pypi.org", "2", code]);
        for (code, expected) in
            [("3", vec![("look up pypi.org", Some("REFUSED"), 2)]), ("0", vec![])]
        {
            let exec = start(&*sandbox, &ask(code), &named(code)).await;
            let end = exec.wait().await.unwrap();
            let said = text(&*exec, LogStream::Stdout).await;
            assert_eq!((end.exit_code.to_string().as_str(), &*said), (code, "True 5 True\n"));
            assert_eq!(told(&end.denials), expected);
            assert!(end.denials.iter().all(|one| one.wall == "network"), "{:?}", end.denials);
        }
        // The C library's own way, which says what it always said.
        let (end, _) = run(&*sandbox, "getent hosts crates.example; exit 4").await;
        let what: Vec<_> = end.denials.iter().map(|denial| denial.what.as_str()).collect();
        assert_eq!((end.exit_code, what), (4, vec!["look up crates.example"]));
        // While two run, nobody can tell which of them asked.
        let idle = start(&*sandbox, &sh("sleep 60"), &named("idle")).await;
        let end = start(&*sandbox, &ask("5"), &named("5")).await.wait().await.unwrap();
        assert_eq!((end.exit_code, told(&end.denials)), (5, vec![]));
        idle.kill().await.unwrap();
        assert_eq!(told(&idle.wait().await.unwrap().denials), []);
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn whoever_asks_for_names_in_nonsense_holds_nobody_up() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let exec = start(&*sandbox, &python(NO_QUESTIONS), &named("nonsense")).await;
        let said = soon("a command beside it", run(&*sandbox, "echo on")).await.1;
        assert_eq!(said, "on\n");
        let end = soon("its end", exec.wait()).await.unwrap();
        assert_eq!(end.exit_code, 1);
        let (end, _) = run(&*sandbox, "getent hosts later.example; exit 4").await;
        assert_eq!(end.denials[0].what, "look up later.example", "init goes on");
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn whoever_spams_refused_calls_holds_nobody_up() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let spam = python(SPAM).timeout(Duration::from_secs(6));
        let exec = start(&*sandbox, &spam, &named("spam")).await;
        until(&*exec, "spams").await;
        for _ in 0..5 {
            let (end, said) = soon("another command", run(&*sandbox, "echo on")).await;
            assert_eq!((end.exit_code, said.as_str()), (0, "on\n"));
            soon("to suspend", sandbox.suspend()).await.unwrap();
            soon("to resume", sandbox.resume()).await.unwrap();
        }
        let end = soon("its timeout", exec.wait()).await.unwrap();
        assert_eq!(end.cause, ExecCause::TimedOut);
        let [(what, errno, count)] = told(&end.denials)[..] else { panic!("{:?}", end.denials) };
        assert_eq!((what, errno), ("call mount", Some("EPERM")));
        assert!(count > 1_000, "control: it did spam, {count} times");
        assert_eq!(run(&*sandbox, "pgrep -c python").await.1, "0\n", "nothing of it is left");
        let exec = start(&*sandbox, &python(SPAM), &named("again")).await;
        until(&*exec, "spams").await;
        soon("to end one", exec.kill()).await.unwrap();
        soon("the end of one", exec.wait()).await.unwrap();
        let exec = start(&*sandbox, &python(SPAM), &named("last")).await;
        until(&*exec, "spams").await;
        soon("to destroy", sandbox.destroy()).await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_refused_after_the_daemon_is_gone_is_told_to_the_next() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let chroot = "import ctypes, time; time.sleep(0.5); ctypes.CDLL(None).chroot(b'/'); raise SystemExit(5)";
        let exec = start(&*sandbox, &python(chroot), &named("alone")).await;
        let anchor = sandbox.anchor().unwrap();
        drop((exec, sandbox, backend));
        tokio::time::sleep(Duration::from_millis(1200)).await;
        let backend = place.backend();
        let sandbox = backend.adopt(&place.id, &place.spec, &anchor).await.unwrap().unwrap();
        let exec = sandbox.find_exec(&ExecId("alone".to_owned())).await.unwrap().unwrap();
        let end = exec.wait().await.unwrap();
        assert_eq!(told(&end.denials), [("call chroot", Some("EPERM"), 1)]);
        sandbox.destroy().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn nobody_but_init_holds_what_answers_for_the_filter() {
        let place = Place::new(ResourceLimits::default());
        let backend = place.backend();
        let sandbox = place.make(&backend).await;
        let exec = start(&*sandbox, &sh("sleep 60"), &named("sleeps")).await;
        let followed = ExecOptions { explain: warren::Explain::Inside, ..named("followed") };
        let followed = start(&*sandbox, &sh("sleep 60"), &followed).await;
        let holders = || {
            let entries = std::fs::read_dir("/proc").unwrap().flatten();
            let processes =
                entries.filter(|entry| entry.file_name().to_string_lossy().parse::<u32>().is_ok());
            let holds = |path: &std::path::Path| {
                let fds = std::fs::read_dir(path.join("fd")).into_iter().flatten().flatten();
                fds.filter_map(|fd| std::fs::read_link(fd.path()).ok())
                    .any(|link| link.to_string_lossy().contains("seccomp notify"))
            };
            let holding = processes.map(|entry| entry.path()).filter(|path| holds(path));
            let names = holding.filter_map(|path| std::fs::read_to_string(path.join("comm")).ok());
            names.map(|name| name.trim().to_owned()).collect::<Vec<_>>()
        };
        let names = holders();
        if rustix::process::geteuid().is_root() {
            assert!(!names.is_empty(), "control: init does");
        }
        assert!(names.iter().all(|name| name == "warren-init"), "{names:?}");
        drop((exec, followed));
        sandbox.destroy().await.unwrap();
    }
}
