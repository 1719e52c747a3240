//! Roots that stand on layers.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use warren::{
    Base, CreateOptions, HostTools, IsolationBackend as _, LayerId, SandboxError, SandboxSpec,
};

use super::{Place, sh};

#[tokio::test(flavor = "multi_thread")]
async fn a_root_stands_on_layers_below_and_above_what_warren_makes() {
    let place = Place::new();
    let below = place.layers.begin().unwrap();
    let tree = below.path();
    fs::create_dir_all(tree.join("data/sub")).unwrap();
    fs::write(tree.join("data/sub/file"), "below").unwrap();
    fs::write(tree.join("data/hidden"), "below").unwrap();
    let (below, _held) = below.commit().unwrap();
    let above = place.layers.begin().unwrap();
    let tree = above.path();
    fs::create_dir_all(tree.join("data")).unwrap();
    fs::create_dir_all(tree.join("workspace")).unwrap();
    fs::create_dir_all(tree.join("tmp")).unwrap();
    for place in ["workspace", "tmp"] {
        fs::set_permissions(tree.join(place), fs::Permissions::from_mode(0o777)).unwrap();
    }
    fs::write(tree.join("workspace/note"), "above").unwrap();
    fs::write(tree.join("tmp/kept"), "tmp").unwrap();
    symlink("/etc", tree.join("data/link")).unwrap();
    let (above, _held) = above.commit().unwrap();

    let base = Base {
        layers: vec![below.clone()],
        changes: vec![above.clone()],
        host_tools: HostTools::Shown,
    };
    let sandbox = place.on(&base).await;
    let seen = "cat /data/sub/file /data/hidden /workspace/note /tmp/kept; readlink /data/link";
    assert_eq!(sh(&*sandbox, seen).await, "belowbelowabovetmp/etc\n");
    sh(&*sandbox, "echo x > /workspace/note2; rm /workspace/note; mkdir /tmp/d; echo y > /tmp/d/f")
        .await;
    assert_eq!(sh(&*sandbox, "cd /workspace; ls; cat /tmp/d/f").await, "note2\ny\n");
    let both = place.on(&base).await;
    assert_eq!(sh(&*both, "cd /workspace; ls; ls /tmp").await, "note\nkept\n", "it is its own");
    // Nothing that lives loses what it stands on, whoever collects.
    assert_eq!(place.layers.collect(&[].into()).unwrap().layers, 0);
    let ground = fs::read(place.layers.path(&above).join("workspace/note")).unwrap();
    assert_eq!(ground, b"above");
    sandbox.destroy().await.unwrap();
    both.destroy().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_layer_that_is_not_there_is_an_error_that_names_it() {
    let place = Place::new();
    let id = LayerId::of([7; 32]);
    let base = Base { changes: vec![id.clone()], ..Base::default() };
    let options = CreateOptions { base, ..CreateOptions::default() };
    let made = place.backend.create_sandbox_with(&SandboxSpec::default(), &options).await;
    let error = made.map(|sandbox| sandbox.id().clone()).unwrap_err();
    assert!(
        matches!(&error, SandboxError::NotFound { what: "layer", id: named } if *named == id.to_string()),
        "{error}"
    );
    assert!(place.path().join("storage/staging").read_dir().unwrap().next().is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_longer_than_the_kernel_stacks_becomes_a_short_one() {
    let place = Place::new();
    let mut changes = Vec::new();
    let mut held = Vec::new();
    for number in 0..warren::MAX_LAYERS {
        let staging = place.layers.begin().unwrap();
        let tree = staging.path();
        fs::create_dir(tree.join("workspace")).unwrap();
        fs::set_permissions(tree.join("workspace"), fs::Permissions::from_mode(0o777)).unwrap();
        fs::write(tree.join(format!("workspace/{number}")), number.to_string()).unwrap();
        fs::write(tree.join("workspace/last"), number.to_string()).unwrap();
        let (id, kept) = staging.commit().unwrap();
        changes.push(id);
        held.push(kept);
    }
    let mut base = Base { changes, ..Base::default() };
    for round in 0..2 {
        let sandbox = place.on(&base).await;
        sh(&*sandbox, &format!("rm /workspace/{round}; echo {round} > /workspace/own{round}"))
            .await;
        let capture = sandbox.capture().await.unwrap();
        assert!(capture.base.changes.len() <= 4, "{:?}", capture.base);
        sandbox.destroy().await.unwrap();
        base = capture.base;
        held.push(capture.held);
    }
    let sandbox = place.on(&base).await;
    let seen =
        sh(&*sandbox, "cd /workspace; cat last 39 own0 own1; ls | wc -l; ls 0 1 2>&1 | wc -l")
            .await;
    assert_eq!(seen, "39390\n1\n41\n2\n");
    sandbox.destroy().await.unwrap();
}
