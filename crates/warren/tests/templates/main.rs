//! Templates: built step by step, named, tagged, and stood on.
//!
//! All cases run as root and, by the last test, as a plain user.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

#[path = "../shared/plain_user.rs"]
mod plain_user;

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use warren::backend::LinuxBackend;
use warren::image::Registries;
use warren::layers::Layers;
use warren::template::{
    self, Build, BuildRequest, BuildStatus, Context, LogLevel, Origin, StepKind, TemplateName,
    Templates, Upload,
};
use warren::{
    Command, CreateOptions, ExecContext, IsolationBackend, Sandbox, SandboxError, SandboxSpec,
};

struct Place {
    directory: tempfile::TempDir,
    backend: Arc<LinuxBackend>,
    templates: Templates,
}

impl Place {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let layers = Layers::open(directory.path().join("storage")).unwrap();
        let backend = Arc::new(LinuxBackend::with_layers(None, layers.clone()).unwrap());
        let templates = Templates::new(layers, backend.clone(), Registries::default());
        Self { directory, backend, templates }
    }

    /// A root with a shell in it.
    fn root(&self) -> String {
        let root = self.directory.path().join("root");
        if !root.exists() {
            for name in ["bin", "etc", "srv", "home/app"] {
                fs::create_dir_all(root.join(name)).unwrap();
            }
            fs::copy("/bin/busybox", root.join("bin/busybox")).expect("busybox-static");
            let mode = fs::Permissions::from_mode(0o755);
            fs::set_permissions(root.join("bin/busybox"), mode).unwrap();
            for name in [
                "sh", "cat", "ls", "id", "env", "stat", "rm", "mkdir", "sleep", "nc", "chmod",
                "date",
            ] {
                symlink("busybox", root.join("bin").join(name)).unwrap();
            }
            let passwd = "root:x:0:0::/:/bin/sh\nuser:x:1000:1000::/home/app:/bin/sh\n";
            fs::write(root.join("etc/passwd"), passwd).unwrap();
            fs::write(root.join("etc/group"), "root:x:0:\nuser:x:1000:\n").unwrap();
            let open = fs::Permissions::from_mode(0o777);
            fs::set_permissions(root.join("srv"), open).unwrap();
        }
        root.to_str().unwrap().to_owned()
    }

    fn request(&self, recipe: &str) -> BuildRequest {
        let recipe = template::parse(&recipe.replace("ROOT", &self.root())).unwrap();
        BuildRequest {
            origin: recipe.origin,
            steps: recipe.steps,
            start: recipe.start,
            ready: recipe.ready,
            ..BuildRequest::default()
        }
    }

    async fn build(&self, name: &str, request: BuildRequest) -> Arc<Build> {
        let name: TemplateName = name.parse().unwrap();
        let build = self.templates.prepare("me", &name, &[]).unwrap();
        assert_eq!(build.status(), BuildStatus::Waiting);
        self.templates.start(&build, request).unwrap();
        assert_ne!(build.status(), BuildStatus::Waiting);
        build.wait().await;
        build
    }

    async fn ready(&self, name: &str, recipe: &str) -> Arc<Build> {
        let build = self.build(name, self.request(recipe)).await;
        assert_eq!(build.status(), BuildStatus::Ready, "{:#?}", build.log(0, 1000));
        build
    }

    async fn sandbox(&self, name: &str) -> Box<dyn Sandbox> {
        let (template, _held) = self.templates.hold("me", name).unwrap();
        let mut spec = SandboxSpec::default();
        template.defaults.apply(&mut spec);
        let options = CreateOptions { base: template.base, ..CreateOptions::default() };
        self.backend.create_sandbox_with(&spec, &options).await.unwrap()
    }

    async fn sh(&self, name: &str, script: &str) -> String {
        let sandbox = self.sandbox(name).await;
        let said = sh(&*sandbox, script).await;
        sandbox.destroy().await.unwrap();
        said
    }

    fn nothing_is_left(&self) {
        let staging = self.directory.path().join("storage/staging");
        assert_eq!(fs::read_dir(staging).unwrap().count(), 0);
    }
}

async fn sh(sandbox: &dyn Sandbox, script: &str) -> String {
    let command = Command::new("/bin/sh").args(["-c", script]);
    let output = sandbox.exec(&command, &ExecContext::default()).await.unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.exit_code, 0, "{script}: {err}");
    String::from_utf8(output.stdout).unwrap()
}

fn said(build: &Build, step: &str, level: LogLevel) -> Vec<String> {
    let log = build.log(0, usize::MAX);
    let wanted =
        log.into_iter().filter(|one| one.step.as_deref() == Some(step) && one.level == level);
    wanted.map(|one| one.message).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recipe_becomes_a_template_and_steps_that_were_done_are_known() {
    let place = Place::new();
    let recipe = "FROM ROOT\nENV A=one B=two\nWORKDIR /srv/app\nRUN echo hello $A; echo oops >&2; echo $A > a\n\
                  RUN cat a; echo $B >> a";
    let build = place.ready("first:v1", recipe).await;
    assert_eq!(
        said(&build, "3", LogLevel::Info),
        ["RUN echo hello $A; echo oops >&2; echo $A > a", "hello one"]
    );
    assert_eq!(said(&build, "3", LogLevel::Warn), ["oops"]);
    assert_eq!(said(&build, "4", LogLevel::Info)[1..], ["one"]);
    assert_eq!(place.sh("first:v1", "cat a; echo $A $B").await, "one\ntwo\none two\n");
    let template = place.templates.find("me", "first:v1").unwrap();
    assert_eq!((template.id, template.base.layers.len()), (build.id(), 1));
    assert_eq!(template.defaults.workdir.as_deref(), Some(Path::new("/srv/app")));

    let again = place.ready("second", recipe).await;
    for step in ["2", "3", "4"] {
        assert!(
            said(&again, step, LogLevel::Info).contains(&"known from before".to_owned()),
            "{step}"
        );
    }
    assert_eq!(place.templates.find("me", "second").unwrap().base, template.base);
    // What differs, and what stands on that, is done anew.
    let other = place.ready("third", &recipe.replace("cat a;", "cat a a;")).await;
    assert!(said(&other, "3", LogLevel::Info).contains(&"known from before".to_owned()));
    assert_eq!(said(&other, "4", LogLevel::Info)[1..], ["one", "one"]);
    let other = place.ready("fourth", &recipe.replace("A=one", "A=1")).await;
    assert_eq!(said(&other, "3", LogLevel::Info)[1..], ["hello 1"]);
    let forced = BuildRequest { force: true, ..place.request(recipe) };
    let forced = place.build("fifth", forced).await;
    assert_eq!(said(&forced, "3", LogLevel::Info)[1..], ["hello one"]);
    place.nothing_is_left();

    // From another one, with more on top.
    place.ready("child", "FROM template:first:v1\nENV A=child\nRUN echo child >> a").await;
    assert_eq!(place.sh("child", "cat a; echo $A $B").await, "one\ntwo\nchild\nchild two\n");
    assert_eq!(place.sh("first:v1", "cat a").await, "one\ntwo\n", "its parent is as it was");
}

#[tokio::test(flavor = "multi_thread")]
async fn on_the_hosts_toolchain_what_was_written_is_there() {
    let place = Place::new();
    place.ready("tools", "FROM host\nRUN echo made > /workspace/note").await;
    assert_eq!(place.sh("tools", "cat /workspace/note").await, "made\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn files_are_copied_as_a_dockerfile_says_and_known_by_what_is_in_them() {
    let place = Place::new();
    let files = place.directory.path().join("files");
    fs::create_dir_all(files.join("dir/sub")).unwrap();
    fs::write(files.join("one"), "1").unwrap();
    fs::write(files.join("two"), "2").unwrap();
    fs::write(files.join("dir/three"), "3").unwrap();
    fs::write(files.join("dir/sub/four"), "4").unwrap();
    symlink("/etc/passwd", files.join("link")).unwrap();
    let pack = || {
        let mut bytes = Vec::new();
        let dir = fs::File::open(&files).unwrap().into();
        warren::archive::pack(&mut bytes, dir, b"").unwrap();
        bytes
    };
    let recipe = "FROM ROOT\nWORKDIR /srv/w\nCOPY one renamed\nCOPY one two into/\nCOPY dir /srv/dir\n\
                  COPY --chmod=700 one /srv/mode/\nCOPY dir/*.txt /srv/glob/\nCOPY one /srv";
    let with = |bytes: &[u8]| {
        let context = Context::unpack(place.templates.layers(), bytes).unwrap();
        BuildRequest { context: Some(Arc::new(context)), ..place.request(recipe) }
    };
    let build = place.build("copied", with(&pack())).await;
    assert_eq!(build.status(), BuildStatus::Ready, "{:#?}", build.log(0, 100));
    let seen = "cd /srv; cat w/renamed w/into/one w/into/two dir/three dir/sub/four glob/three one; \
                stat -c %a mode/one";
    assert_eq!(place.sh("copied", seen).await, "11234".to_owned() + "31" + "700\n");
    fs::write(files.join("two"), "changed").unwrap();
    let again = place.build("copied", with(&pack())).await;
    let known =
        |step: &str| said(&again, step, LogLevel::Info).contains(&"known from before".to_owned());
    assert!(known("2"), "what it copies is the same");
    assert!(!known("3") && !known("4"), "another file, and all that stands on it");
    assert_eq!(place.sh("copied", "cat /srv/w/into/two").await, "changed", "the tag moved");
    assert_eq!(place.templates.list("me").unwrap().len(), 2);

    for (recipe, why) in [
        ("FROM ROOT\nCOPY ../one /srv/x", "leads out"),
        ("FROM ROOT\nCOPY nothing /srv/x", "not in the context"),
        ("FROM ROOT\nCOPY link /srv/x", "not in the context"),
    ] {
        let context = Context::unpack(place.templates.layers(), &pack()[..]).unwrap();
        let request = BuildRequest { context: Some(Arc::new(context)), ..place.request(recipe) };
        let failed = place.build("bad", request).await;
        let BuildStatus::Failed(failure) = failed.status() else { panic!("{recipe}") };
        assert!(failure.message.contains(why), "{recipe}: {failure:?}");
        assert_eq!(failure.step, "1");
    }
    let failed = place.build("bad", place.request("FROM ROOT\nCOPY one /srv/x")).await;
    assert!(matches!(failed.status(), BuildStatus::Failed(_)), "there are no files at all");
    place.templates.find("me", "bad").unwrap_err();
    place.nothing_is_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_build_that_fails_or_is_ended_leaves_nothing() {
    let place = Place::new();
    for (recipe, step, why) in [
        ("FROM ROOT\nRUN true\nRUN echo no >&2; exit 3", "2", "exit code 3"),
        ("FROM ROOT\nUSER nobody-such\nRUN true", "2", "user"),
        ("FROM template:nothing\nRUN true", "base", "no template `nothing`"),
        ("FROM /nowhere/at/all", "base", "nowhere"),
        ("FROM ROOT\nCMD sleep 1000\nHEALTHCHECK CMD false", "finalize", "`false`"),
    ] {
        // The last one would wait for two minutes: what it starts ends at once instead.
        let recipe = recipe.replace("sleep 1000", "echo broken; exit 4");
        let why = if step == "finalize" { "exit code 4: broken" } else { why };
        let build = place.build("never", place.request(&recipe)).await;
        let BuildStatus::Failed(failure) = build.status() else { panic!("{recipe}") };
        assert_eq!(failure.step, step, "{recipe}: {failure:?}");
        assert!(failure.message.contains(why), "{recipe}: {failure:?}");
        let last = build.log(0, usize::MAX).pop().unwrap();
        assert_eq!((last.level, last.message), (LogLevel::Error, failure.message));
    }
    let name: TemplateName = "never".parse().unwrap();
    let build = place.templates.prepare("me", &name, &[]).unwrap();
    place.templates.start(&build, place.request("FROM ROOT\nRUN echo up; sleep 1000")).unwrap();
    while said(&build, "1", LogLevel::Info).len() < 2 {
        build.more(build.log(0, usize::MAX).len()).await;
    }
    place.templates.start(&build, place.request("FROM ROOT")).expect_err("only once");
    build.cancel();
    let BuildStatus::Failed(failure) = build.wait().await else { panic!("it was ended") };
    assert!(failure.message.contains("ended"), "{failure:?}");
    assert!(place.templates.list("me").unwrap().is_empty());
    assert!(place.backend.list_sandboxes().await.unwrap().is_empty());
    place.nothing_is_left();
    place.templates.shutdown().await;
    let build = place.templates.prepare("me", &name, &[]).unwrap();
    place.templates.start(&build, place.request("FROM ROOT")).expect_err("no more work is taken");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_template_starts_runs_in_each_sandbox_and_is_waited_for() {
    let place = Place::new();
    let recipe = "FROM ROOT\nWORKDIR /srv\nENV WORD=served\n\
                  CMD sleep 0.3; echo $WORD > /srv/up; sleep 1000\nHEALTHCHECK CMD cat /srv/up";
    place.ready("server", recipe).await;
    let template = place.templates.find("me", "server").unwrap();
    let sandbox = place.sandbox("server").await;
    let nobody = template::Behalf::default();
    template::begin(&*sandbox, &template.defaults, Duration::from_secs(60), &nobody).await.unwrap();
    assert_eq!(sh(&*sandbox, "cat /srv/up").await, "served\n");
    template::begin(&*sandbox, &template.defaults, Duration::from_secs(60), &nobody).await.unwrap();
    let execs = sandbox.list_execs().await.unwrap();
    let started = execs.iter().filter(|exec| exec.id().as_str() == template::START);
    assert_eq!(started.count(), 1, "nothing is started twice");
    let never = template::Defaults { ready: Some("false".to_owned()), ..Default::default() };
    let error =
        template::begin(&*sandbox, &never, Duration::from_millis(50), &nobody).await.unwrap_err();
    assert!(matches!(error, SandboxError::Timeout { .. }), "{error}");
    sandbox.destroy().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_an_owners_and_tags_move() {
    let place = Place::new();
    let one = place.ready("x:a", "FROM ROOT\nRUN echo 1 > /srv/n").await;
    let two = place.ready("x:b", "FROM ROOT\nRUN echo 2 > /srv/n").await;
    let templates = &place.templates;
    let id = |name: &str| templates.find("me", name).map(|found| found.id);
    assert_eq!((id("x:a").unwrap(), id("x:b").unwrap()), (one.id(), two.id()));
    id("x").expect_err("nothing has the default tag");
    templates.tag("me", "x:a", &["default".to_owned(), "b".to_owned()]).unwrap();
    assert_eq!((id("x").unwrap(), id("x:b").unwrap()), (one.id(), one.id()), "it has b now");
    assert_eq!(id(&two.id().to_string()).unwrap(), two.id(), "and is found by its id still");
    templates.untag("me", &"x:b".parse().unwrap()).unwrap();
    id("x:b").expect_err("the one before has it no more either");
    templates.tag("me", "x:a", &["no good".to_owned()]).unwrap_err();
    // Nobody else knows of them.
    for name in ["x:a", &one.id().to_string()] {
        let error = templates.find("other", name).unwrap_err();
        assert!(matches!(error, SandboxError::NotFound { what: "template", .. }), "{error}");
        templates.remove("other", name).unwrap_err();
        templates.tag("other", name, &["t".to_owned()]).unwrap_err();
    }
    templates.build("other", one.id()).unwrap_err();
    templates.build("me", one.id()).unwrap();

    // They outlive the process, and their layers are kept for as long as anything names them.
    let layers = templates.layers().clone();
    assert_eq!(layers.collect_unnamed([]).unwrap().layers, 0);
    let again = Templates::new(layers.clone(), place.backend.clone(), Registries::default());
    assert_eq!(again.list("me").unwrap(), templates.list("me").unwrap());
    let sandbox = place.sandbox("x").await;
    assert_eq!(templates.remove("me", "x").unwrap().len(), 2);
    templates.forget_steps().unwrap();
    assert!(templates.list("me").unwrap().is_empty());
    layers.collect_unnamed([]).unwrap();
    assert_eq!(sh(&*sandbox, "cat /srv/n").await, "1\n", "one that lives stands on it still");
    sandbox.destroy().await.unwrap();
    layers.collect_unnamed([]).unwrap();
    assert_eq!(layers.list().unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_archive_that_was_sent_is_a_root_or_an_image() {
    let place = Place::new();
    let packed = std::process::Command::new("tar").args(["-c", "-C", &place.root(), "."]).output();
    let mut upload = Upload::begin(place.templates.layers()).unwrap();
    for piece in packed.unwrap().stdout.chunks(100_000) {
        upload.write(piece).unwrap();
    }
    let request = BuildRequest {
        origin: Origin::Upload,
        upload: Some(Arc::new(upload)),
        steps: vec![template::Step {
            kind: StepKind::Run { command: "echo sent > /srv/note".to_owned(), user: None },
            force: false,
        }],
        ..BuildRequest::default()
    };
    let build = place.build("sent", request).await;
    assert_eq!(build.status(), BuildStatus::Ready, "{:#?}", build.log(0, 100));
    assert_eq!(place.sh("sent", "cat /srv/note").await, "sent\n");
    place.nothing_is_left();
    let none = BuildRequest { origin: Origin::Upload, ..BuildRequest::default() };
    assert!(matches!(place.build("none", none).await.status(), BuildStatus::Failed(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn root_of_a_build_installs_things() {
    if !rustix::process::geteuid().is_root() {
        // A plain user has one id to give, and the profile says so.
        let place = Place::new();
        let mut request = place.request("FROM ROOT\nRUN true");
        request.spec.profile = "dev".to_owned();
        assert!(matches!(place.build("dev", request).await.status(), BuildStatus::Failed(_)));
        return;
    }
    let place = Place::new();
    let mut request = place.request(
        "FROM ROOT\nUSER root\nRUN mkdir -p /usr/local/bin; echo tool > /usr/local/bin/tool; id -u\n\
         USER user\nRUN id -u",
    );
    request.spec.profile = "dev".to_owned();
    let build = place.build("dev", request).await;
    assert_eq!(build.status(), BuildStatus::Ready, "{:#?}", build.log(0, 100));
    assert_eq!(said(&build, "2", LogLevel::Info)[1..], ["0"]);
    assert_eq!(said(&build, "4", LogLevel::Info)[1..], ["1000"]);
    assert_eq!(
        place.sh("dev", "cat /usr/local/bin/tool; stat -c %u /usr/local/bin/tool").await,
        "tool\n0\n"
    );
}

#[test]
fn a_plain_user_has_the_same() {
    plain_user::rerun(&["--skip", "a_plain_user_has_the_same", "--test-threads", "1"]);
}
