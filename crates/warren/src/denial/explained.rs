//! What a followed command was refused, in words, with the smallest grant that would allow it.
//!
//! Init tells facts; here they meet what the spec says and what `warren` calls things. What comes from
//! init is read as hostile: paths may hold anything.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use warren_init::domain;
use warren_init::protocol::denied::{Barred, Bound, Denials, Denied, PathWall, Refused, Right};
use warren_sys::seccomp::{Action, Arch, Call, evaluate};

use super::of_limit;
use crate::profile::{self, CALLS, Seccomp};
use crate::{Denial, Destination, EnforcedLimit, Limit, SandboxSpec, egress};

/// Tells where a path really is, if it is there.
pub(crate) type Really = dyn Fn(&Path) -> Option<PathBuf>;

/// What is known of the sandbox, and of the host as far as it may be told.
pub(crate) struct Ground<'a> {
    pub(crate) spec: &'a SandboxSpec,
    pub(crate) limits: &'a [EnforcedLimit],
    /// Whether it has no root of its own: its paths are those of the host.
    pub(crate) on_host: bool,
    /// Asks the host; absent if nobody may know.
    pub(crate) host: Option<&'a Really>,
}

impl Ground<'_> {
    /// Says what was refused; what turns out to be no wall's is left out.
    pub(crate) fn explain(&self, denials: &Denials) -> Vec<Denial> {
        let mut all: Vec<Denial> = Vec::new();
        for denied in &denials.list {
            let Some(denial) = self.denial(denied) else { continue };
            let same = |known: &&mut Denial| known.what == denial.what && known.wall == denial.wall;
            match all.iter_mut().find(same) {
                Some(known) => known.count = known.count.saturating_add(denial.count),
                None => all.push(denial),
            }
        }
        if denials.omitted > 0 {
            all.push(Denial {
                wall: "explain".to_owned(),
                what: format!("{} more, which are not listed", denials.omitted),
                by: "whichever walls".to_owned(),
                errno: None,
                count: 1,
                grant: None,
            });
        }
        all
    }

    fn denial(&self, denied: &Denied) -> Option<Denial> {
        let Denied { what, errno, count } = denied;
        let (wall, what, by, grant) = match what {
            Refused::Path { path, place, right, wall } => self.path(path, place, *right, wall),
            Refused::Absent { path, right } => self.absent(path, *right)?,
            Refused::Call { nr, args } => self.call(*nr, args),
            Refused::Address { address, port } => self.address(address, *port)?,
            Refused::Name(name) => self.name(name),
            Refused::Destination { to, port, why } => self.destination(to, *port, *why),
            Refused::Bound(bound) => {
                let limit = match bound {
                    Bound::OpenFiles => Limit::OpenFiles,
                    Bound::Processes => Limit::Processes,
                    Bound::Written => Limit::Write,
                };
                let denial = of_limit(limit, self.limits)?;
                return Some(Denial { errno: Some(name_of(*errno)), count: *count, ..denial });
            }
        };
        let (wall, errno) = (wall.to_owned(), Some(name_of(*errno)));
        Some(Denial { wall, what, by, errno, count: *count, grant })
    }

    fn path(&self, path: &[u8], place: &[u8], right: Right, wall: &PathWall) -> Told {
        let what = format!("{} {}", verb(right), shown(path));
        match wall {
            PathWall::ReadOnly { mount } => {
                let grant = self.writable(path, place, mount);
                ("mount", what, format!("the read-only mount {}", shown(mount)), grant)
            }
            PathWall::NoExecute { mount } => {
                let by = format!("the mount {}, from which nothing is executed", shown(mount));
                ("mount", what, by, None)
            }
            PathWall::Rules { closed } => {
                let by = match closed {
                    false => "Landlock",
                    true => "Landlock, and the permissions there",
                };
                let grant = match self.on_host {
                    true => Some(shown_on_host(path, place, right)),
                    false => self.own(path),
                };
                ("landlock", what, by.to_owned(), grant)
            }
        }
    }

    /// Says how to have a place writable that is on a read-only mount.
    fn writable(&self, path: &[u8], place: &[u8], mount: &[u8]) -> Option<String> {
        let (place, mount) = (as_path(place), as_path(mount));
        if self.spec.allowed_paths_ro.iter().any(|path| path == mount) {
            return Some(format!("--rw {}", quoted(place)));
        }
        let bind = self.spec.bind_mounts.iter().find(|bind| bind.target == mount);
        if let Some(bind) = bind {
            let below = place.strip_prefix(mount).ok()?;
            let source = if below.as_os_str().is_empty() {
                bind.source.clone()
            } else {
                bind.source.join(below)
            };
            return Some(format!("--bind {}:{}", quoted(&source), quoted(place)));
        }
        // What the host shows of itself is everybody's: something of one's own in its place. Nothing is
        // made on the host, so it must be there.
        let at = if as_path(path) == place || place != mount { place } else { return None };
        (!is_kernels(at)).then(|| format!("--bind SRC:{}", quoted(at)))
    }

    /// Says how to have something of one's own at a path of the sandbox's root.
    fn own(&self, path: &[u8]) -> Option<String> {
        let path = as_path(path);
        (!is_kernels(path) && path != Path::new("/"))
            .then(|| format!("--bind SRC:{}", quoted(path)))
    }

    /// Something that is not there: a wall's doing if the host has it, and no one's otherwise.
    fn absent(&self, path: &[u8], right: Right) -> Option<Told> {
        let path_there = as_path(path);
        if is_kernels(path_there) {
            return None;
        }
        let real = self.host?(path_there)?;
        let what = format!("{} {}", verb(right), shown(path));
        let grant = match (real == path_there, right) {
            (true, Right::Read | Right::Execute) => format!("--ro {}", quoted(path_there)),
            (true, _) => format!("--rw {}", quoted(path_there)),
            (false, Right::Read | Right::Execute) => {
                format!("--bind {}:{}:ro", quoted(&real), quoted(path_there))
            }
            (false, _) => format!("--bind {}:{}", quoted(&real), quoted(path_there)),
        };
        let by = "the sandbox's root, in which this path of the host is not shown".to_owned();
        Some(("mount", what, by, Some(grant)))
    }

    /// Says how to have a destination reached: where there is a network to reach it from.
    fn reached(&self, destination: &str) -> Option<String> {
        let is_one = destination.parse::<Destination>().is_ok();
        (!self.on_host && is_one).then(|| format!("--allow-net {destination}"))
    }

    fn name(&self, name: &[u8]) -> Told {
        let by = match egress::is_asked(self.spec) {
            true => "what the sandbox may reach, which has no such name",
            false => "the sandbox's own network, which has no name server",
        };
        let grant = domain::canonical(name).and_then(|name| self.reached(&name));
        ("network", format!("look up {}", shown(name)), by.to_owned(), grant)
    }

    fn address(&self, address: &[u8], port: u16) -> Option<Told> {
        let address = match *address {
            [a, b, c, d] => IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
            _ => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(address).ok()?)),
        };
        let by = "the sandbox's own network, from which no way leads out".to_owned();
        let grant = egress::is_public(address).then(|| SocketAddr::new(address, port).to_string());
        let grant = grant.and_then(|destination| self.reached(&destination));
        Some(("network", format!("reach {address} port {port}"), by, grant))
    }

    /// What was decided outside about a connection.
    fn destination(&self, to: &[u8], port: u16, why: Barred) -> Told {
        let to = shown(to);
        let (by, grant) = match why {
            Barred::NotAllowed => {
                let destination = match to.parse() {
                    Ok(address) => SocketAddr::new(address, port).to_string(),
                    Err(_) => format!("{to}:{port}"),
                };
                ("what the sandbox may reach", self.reached(&destination))
            }
            Barred::NotPublic => ("the broker, which leads to public addresses alone", None),
            Barred::Unclear => ("the broker, which cannot tell whom it names", None),
        };
        ("network", format!("reach {to} port {port}"), by.to_owned(), grant)
    }

    /// A call that the filter refused: which filter would not.
    fn call(&self, nr: u32, args: &[u64; 6]) -> Told {
        let name = call_name(nr);
        let own = self.spec.seccomp_profile.as_deref();
        let profile = profile::profile(&self.spec.profile);
        let own = own.or(profile.map(|profile| profile.seccomp)).unwrap_or("default");
        let call = Call { arch: Arch::NATIVE.audit(), nr, args: *args };
        let wider = ["strict", "default", "permissive"].into_iter();
        let wider = wider.skip_while(|name| *name != own).skip(1).filter_map(profile::seccomp);
        let grant = wider.into_iter().find(|filter| allows(filter, &call)).map(|filter| {
            // Without a network of the profile's the sockets alone lead nowhere.
            match name.as_deref() {
                Some("socket") => format!("--profile {}", filter.name),
                _ => format!("--seccomp {}", filter.name),
            }
        });
        let what = format!("call {}", name.unwrap_or_else(|| format!("number {nr}")));
        ("seccomp", what, format!("the system call filter `{own}`"), grant)
    }
}

/// Says how to have a path of the host shown as it is. What is to be made is not there to be named.
fn shown_on_host(path: &[u8], place: &[u8], right: Right) -> String {
    let holder = as_path(path).parent().unwrap_or(Path::new("/"));
    match right {
        Right::Read | Right::Execute => format!("--ro {}", quoted(as_path(place))),
        Right::Write | Right::Change => format!("--rw {}", quoted(as_path(place))),
        Right::Create | Right::Remove => format!("--rw {}", quoted(holder)),
    }
}

/// The wall, what was refused, by what, and the grant.
type Told = (&'static str, String, String, Option<String>);

fn allows(filter: &Seccomp, call: &Call) -> bool {
    let older = evaluate(filter.init, call);
    evaluate(filter.workload, call).stacked_on(older) == Action::Allow
}

fn call_name(nr: u32) -> Option<String> {
    let number = |call: &(&str, Option<u32>, Option<u32>)| match Arch::NATIVE {
        Arch::X86_64 => call.1,
        Arch::Aarch64 => call.2,
    };
    CALLS.iter().find(|call| number(call) == Some(nr)).map(|call| call.0.to_owned())
}

fn verb(right: Right) -> &'static str {
    match right {
        Right::Read => "read",
        Right::Write => "write",
        Right::Create => "create",
        Right::Remove => "remove",
        Right::Execute => "execute",
        Right::Change => "change",
    }
}

fn as_path(bytes: &[u8]) -> &Path {
    Path::new(std::ffi::OsStr::from_bytes(bytes))
}

/// What no grant puts anything into.
fn is_kernels(path: &Path) -> bool {
    ["/proc", "/sys", "/dev"].iter().any(|kernel| path.starts_with(kernel))
}

/// A path as it is shown: nothing in it steers a terminal.
fn shown(path: &[u8]) -> String {
    let text = String::from_utf8_lossy(path);
    let safe = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.into() };
    text.chars().map(safe).collect()
}

/// A path as a shell takes it.
fn quoted(path: &Path) -> String {
    let text = shown(path.as_os_str().as_bytes());
    let plain = |c: char| c.is_alphanumeric() || "/._-+@%".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

fn name_of(errno: i32) -> String {
    let name = match errno {
        // No call's: what the sandbox's network says to who asks for names.
        0 => "REFUSED",
        1 => "EPERM",
        2 => "ENOENT",
        11 => "EAGAIN",
        13 => "EACCES",
        24 => "EMFILE",
        28 => "ENOSPC",
        30 => "EROFS",
        38 => "ENOSYS",
        93 => "EPROTONOSUPPORT",
        95 => "EOPNOTSUPP",
        97 => "EAFNOSUPPORT",
        101 => "ENETUNREACH",
        113 => "EHOSTUNREACH",
        other => return format!("errno {other}"),
    };
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BindMount, Bound as Held};

    fn spec() -> SandboxSpec {
        let bind = BindMount { source: "/a".into(), target: "/b".into(), readonly: true };
        let (allowed_paths_ro, bind_mounts) = (vec!["/srv/data".into()], vec![bind]);
        SandboxSpec { allowed_paths_ro, bind_mounts, ..SandboxSpec::default() }
    }

    fn told(spec: &SandboxSpec, what: Refused, errno: i32) -> Vec<(String, Option<String>)> {
        let limit = EnforcedLimit {
            limit: Limit::OpenFiles,
            value: 256,
            bound: Held::Exact,
            by: "rlimit".to_owned(),
        };
        let host = |path: &Path| {
            let known = [("/home/me", "/home/me"), ("/link", "/srv/real")];
            known.iter().find(|(at, _)| Path::new(at) == path).map(|(_, real)| PathBuf::from(real))
        };
        let ground = Ground { spec, limits: &[limit], on_host: false, host: Some(&host) };
        let denials = Denials { list: vec![Denied { what, errno, count: 1 }], omitted: 0 };
        let told = ground.explain(&denials);
        told.into_iter().map(|told| (format!("{}: {}", told.wall, told.what), told.grant)).collect()
    }

    fn path(path: &str, place: &str, mount: &str) -> Refused {
        let wall = PathWall::ReadOnly { mount: mount.into() };
        Refused::Path { path: path.into(), place: place.into(), right: Right::Create, wall }
    }

    #[test]
    fn the_smallest_grant_of_a_path_is_named_as_the_command_line_spells_it() {
        let spec = spec();
        let rules = |path: &str| Refused::Path {
            path: path.into(),
            place: "/".into(),
            right: Right::Write,
            wall: PathWall::Rules { closed: false },
        };
        let absent = |path: &str, right| Refused::Absent { path: path.into(), right };
        for (what, expected, grant) in [
            (
                path("/srv/data/x/y", "/srv/data/x", "/srv/data"),
                "mount: create /srv/data/x/y",
                Some("--rw /srv/data/x"),
            ),
            (path("/b/x/y", "/b/x", "/b"), "mount: create /b/x/y", Some("--bind /a/x:/b/x")),
            (path("/b/y", "/b", "/b"), "mount: create /b/y", Some("--bind /a:/b")),
            (
                path("/usr/local/y", "/usr/local", "/usr"),
                "mount: create /usr/local/y",
                Some("--bind SRC:/usr/local"),
            ),
            (path("/usr/y", "/usr", "/usr"), "mount: create /usr/y", None),
            (path("/proc/sys/x", "/proc/sys/x", "/proc/sys"), "mount: create /proc/sys/x", None),
            (rules("/etc/a b"), "landlock: write /etc/a b", Some("--bind SRC:'/etc/a b'")),
            (absent("/home/me", Right::Read), "mount: read /home/me", Some("--ro /home/me")),
            (absent("/home/me", Right::Write), "mount: write /home/me", Some("--rw /home/me")),
            (absent("/link", Right::Read), "mount: read /link", Some("--bind /srv/real:/link:ro")),
        ] {
            let expected = vec![(expected.to_owned(), grant.map(str::to_owned))];
            assert_eq!(told(&spec, what, 30), expected);
        }
        assert_eq!(
            told(&spec, absent("/etc/nope", Right::Read), 2),
            [],
            "the host has it as little"
        );
    }

    #[test]
    fn whoever_may_not_know_the_host_hears_nothing_of_what_is_absent() {
        let denied = Denied {
            what: Refused::Absent { path: b"/home/me".to_vec(), right: Right::Read },
            errno: 2,
            count: 1,
        };
        let denials = Denials { list: vec![denied], omitted: 0 };
        let ground = Ground { spec: &spec(), limits: &[], on_host: false, host: None };
        assert_eq!(ground.explain(&denials), []);
    }

    #[test]
    fn without_a_root_of_its_own_a_path_is_granted_as_it_is() {
        let grant = |path: &str, right| shown_on_host(path.as_bytes(), path.as_bytes(), right);
        assert_eq!(grant("/etc/a", Right::Read), "--ro /etc/a");
        assert_eq!(grant("/etc/a", Right::Write), "--rw /etc/a");
        assert_eq!(grant("/etc/a", Right::Create), "--rw /etc");
        assert_eq!(grant("/a", Right::Remove), "--rw /");
    }

    #[test]
    fn a_call_is_named_with_the_next_filter_that_lets_it_through() {
        let number = |name: &str| {
            let (_, x86_64, aarch64) = CALLS.iter().find(|call| call.0 == name).unwrap();
            match Arch::NATIVE {
                Arch::X86_64 => x86_64,
                Arch::Aarch64 => aarch64,
            }
            .unwrap()
        };
        let call = |name: &str, first| {
            let what = Refused::Call { nr: number(name), args: [first, 1, 0, 0, 0, 0] };
            told(&spec(), what, 1)
        };
        let expected =
            |what: &str, grant: Option<&str>| vec![(what.to_owned(), grant.map(str::to_owned))];
        assert_eq!(
            call("ptrace", 0),
            expected("seccomp: call ptrace", Some("--seccomp permissive"))
        );
        assert_eq!(call("bpf", 0), expected("seccomp: call bpf", None));
        let strict = SandboxSpec { profile: "strict".to_owned(), ..spec() };
        let socket = Refused::Call { nr: number("socket"), args: [2, 1, 0, 0, 0, 0] };
        assert_eq!(
            told(&strict, socket, 97),
            expected("seccomp: call socket", Some("--profile default"))
        );
    }

    #[test]
    fn an_address_a_bound_and_a_name_that_would_steer_a_terminal_are_told() {
        let address = Refused::Address { address: vec![169, 254, 169, 254], port: 80 };
        let expected = vec![("network: reach 169.254.169.254 port 80".to_owned(), None)];
        assert_eq!(told(&spec(), address, 101), expected);
        let files = told(&spec(), Refused::Bound(Bound::OpenFiles), 24);
        let grant = Some("--open-files 512".to_owned());
        assert_eq!(files, [("limits: more than 256 open files".to_owned(), grant)]);
        assert_eq!(told(&spec(), Refused::Bound(Bound::Processes), 11), [], "nobody holds it");
        let odd = told(&spec(), path("/usr/\x1b[2J\n", "/usr", "/usr"), 30);
        assert_eq!(odd[0].0, r"mount: create /usr/\u{1b}[2J\n");
        let nonsense = Refused::Address { address: vec![1; 5], port: 80 };
        assert_eq!(told(&spec(), nonsense, 101), []);
    }
}
