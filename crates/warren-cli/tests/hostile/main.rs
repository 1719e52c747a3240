//! The hostile suite: code in a sandbox tries to get out, and must not.
//!
//! One module per part of section 4 of the threat list; a comment above each test names its rows, and what
//! holds there: `ci/isolation` makes the table of `docs/isolation.md` of them, and of which tests passed. Every
//! test runs twice, `as_root` and `as_user`, has a control that shows the attempt succeeding where it
//! may, and ends with the host as it was before. The attempts are made by `tests/probe/probe.c`.
//!
//! Needs root (it becomes `nobody` by itself) and a C compiler. `WARREN_BIN` names the binary under
//! test, if it is not the one that cargo built:
//!
//! ```text
//! WARREN_BIN=/usr/local/bin/warren cargo nextest run -p warren-cli --test hostile
//! ```
#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

/// Makes of each `fn name(host: &Host)` two tests, `as_root::name` and `as_user::name`, and one for each other
/// backend.
macro_rules! hostile {
    ($($name:ident),+ $(,)?) => {
        columns! { as_root, crate::host::ROOT, [$($name),+] }
        columns! { as_user, crate::host::NOBODY, [$($name),+] }
        on_each_backend! { [$($name),+] }
    };
}

/// Likewise, of what is about a root and namespaces of its own, where there are some.
macro_rules! hostile_in_namespaces {
    ($($name:ident),+ $(,)?) => {
        columns! { as_root, crate::host::ROOT, [$($name),+] }
        columns! { as_user, crate::host::NOBODY, [$($name),+] }
        on_each_container! { [$($name),+] }
    };
}

/// Likewise, of what init does, whichever runtime it was that made the walls: by one of them.
macro_rules! hostile_by_init {
    ($($name:ident),+ $(,)?) => {
        columns! { as_root, crate::host::ROOT, [$($name),+] }
        columns! { as_user, crate::host::NOBODY, [$($name),+] }
        columns! { by_landlock, crate::host::LANDLOCK, [$($name),+] }
        columns! { by_landlock_as_user, crate::host::LANDLOCK_NOBODY, [$($name),+] }
        columns! { by_oci_crun, crate::host::OCI_CRUN, [$($name),+] }
    };
}

/// Likewise, of what takes long and does not depend on who put up the walls: by `linux` alone. Other columns have such a
/// case "in part".
macro_rules! hostile_by_linux {
    ($($name:ident),+ $(,)?) => {
        columns! { as_root, crate::host::ROOT, [$($name),+] }
        columns! { as_user, crate::host::NOBODY, [$($name),+] }
    };
}

/// Likewise, of what takes long because it waits: by each kind of backend, all at the same time.
macro_rules! hostile_at_once {
    ($($name:ident),+ $(,)?) => {
        mod at_once {
            use crate::host::{
                Column, LANDLOCK, LANDLOCK_NOBODY, NOBODY, OCI_CRUN, OCI_RUNSC, ROOT, check_at_once,
            };

            const COLUMNS: [&Column; 6] =
                [&ROOT, &NOBODY, &LANDLOCK, &LANDLOCK_NOBODY, &OCI_CRUN, &OCI_RUNSC];
            $(#[test] fn $name() { check_at_once(&COLUMNS, stringify!($name), super::$name); })+
        }
    };
}

/// The other backends, a line each: the module of its tests, and who it is (`host.rs`). They try the same, once.
macro_rules! on_each_backend {
    ($names:tt) => {
        columns! { by_landlock, crate::host::LANDLOCK, $names }
        columns! { by_landlock_as_user, crate::host::LANDLOCK_NOBODY, $names }
        on_each_container! { $names }
    };
}

/// Those of them whose sandboxes have namespaces.
macro_rules! on_each_container {
    ($names:tt) => {
        columns! { by_oci_crun, crate::host::OCI_CRUN, $names }
        columns! { by_oci_runc, crate::host::OCI_RUNC, $names }
    };
}

/// Makes of some of them another, `by_oci_runsc::name`: on a kernel of its own, where one takes a third of a second to start.
macro_rules! hostile_by_gvisor {
    ($($name:ident),+ $(,)?) => {
        columns! { by_oci_runsc, crate::host::OCI_RUNSC, [$($name),+] }
    };
}

/// Makes of some of them another, `as_root_inside::name`: whoever is root of a sandbox, by the profile
/// `dev`, gets no further than anybody else.
macro_rules! hostile_as_root_inside {
    ($($name:ident),+ $(,)?) => {
        columns! { as_root_inside, crate::host::ROOT_INSIDE, [$($name),+] }
    };
}

/// The tests of one column of the table in `docs/isolation.md`.
macro_rules! columns {
    ($module:ident, $column:expr, [$($name:ident),+]) => {
        mod $module {
            $(#[test] fn $name() { crate::host::check(&$column, stringify!($name), super::$name); })+
        }
    };
}

mod descriptors;
mod files;
mod host;
mod kernel;
mod network;
mod proc_and_devices;
mod processes;
mod resources;
mod shortage;

/// Prints every kernel feature that the suite stands on, and how many of them this host lacks.
#[test]
fn no_kernel_feature_is_missing_on_this_host() {
    let missing: Vec<_> =
        host::Feature::ALL.iter().filter_map(|f| f.probe().err().map(|why| (f, why))).collect();
    for feature in host::Feature::ALL {
        let state = missing.iter().find(|(f, _)| *f == feature).map_or("present", |(_, why)| why);
        eprintln!("{feature:?}: {state}");
    }
    // Said aloud: what this kernel lacks cannot be seen to succeed. Another answer inside than outside,
    // the filter read back from the kernel, or a host that was furnished with it is the control then.
    let calls = kernel::CALLS.split_whitespace().map(|call| (format!("sys {call}"), "ENOSYS"));
    let others =
        [("x32", "ENOSYS"), ("socket 38 5 0", "EAFNOSUPPORT"), ("stat /dev/mem", "ENOENT")];
    let rows = calls.chain(others.map(|(row, none)| (row.to_owned(), none)));
    let lacks = |row: &str, none: &str| host::answers(row, |r| r != none).is_err();
    let absent: Vec<_> = rows.filter(|(row, none)| lacks(row, none)).map(|(row, _)| row).collect();
    eprintln!(
        "not in this kernel, with a control that does not succeed but tells who refuses: {} ({})",
        absent.len(),
        absent.join(", ")
    );
    // Nobody but the kernel can put a file into a procfs; that others of the same list are masked is tested.
    let without: Vec<_> =
        ["stat /proc/kcore"].into_iter().filter(|row| lacks(row, "ENOENT")).collect();
    eprintln!("without a control: {} ({})", without.len(), without.join(", "));
    eprintln!("kernel features missing: {} of {}", missing.len(), host::Feature::ALL.len());
    assert!(missing.is_empty(), "{} kernel features missing: {missing:?}", missing.len());
}
