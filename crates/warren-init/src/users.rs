//! The users of a sandbox, as its own `/etc/passwd` and `/etc/group` name them.
//!
//! Both may be the work of whoever the sandbox is held against: they are opened without waiting, read
//! up to a bound, and what makes no sense in them is passed over.

use std::fs::File;
use std::io::{self, Read as _};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::plan::{INIT_ID, RANGE};

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
/// How much of a table is read.
const MAX_TABLE: u64 = 1 << 20;
/// How many groups a user is in at most, as the kernel had it for long.
const MAX_GROUPS: usize = 32;
/// How long a name or a home may be to be of use.
const MAX_NAME: usize = 256;
const MAX_HOME: usize = 1024;

/// One of the sandbox's users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) name: Vec<u8>,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Its groups, its own among them.
    pub(crate) groups: Vec<u32>,
    pub(crate) home: Vec<u8>,
    pub(crate) shell: Vec<u8>,
}

/// What users and groups are called.
#[derive(Debug, Default)]
pub(crate) struct Names {
    users: Vec<(u32, Vec<u8>)>,
    groups: Vec<(u32, Vec<u8>)>,
}

impl User {
    /// Finds a user by its name, or by its number. Init's own ids are nobody's, whoever was given them.
    pub(crate) fn find(name: &[u8]) -> io::Result<Option<Self>> {
        let found = find_in(&read(PASSWD)?, &read(GROUP)?, name);
        Ok(found.filter(|user| user.uid != INIT_ID && !user.groups.contains(&INIT_ID)))
    }

    /// Makes a path of one that may be relative to the home, or begin with `~`; `None` if it is
    /// somebody else's home that is asked for.
    pub(crate) fn place(&self, path: &[u8]) -> Option<Vec<u8>> {
        match path {
            [b'/', ..] => return Some(path.to_vec()),
            [b'~'] => return Some(self.home.clone()),
            [b'~', b'/', ..] => {}
            [b'~', ..] => return None,
            _ => {}
        }
        let rest = path.strip_prefix(b"~").unwrap_or(path);
        Some(plain(&[&self.home[..], b"/", rest].concat()))
    }
}

/// Takes out of an absolute path what leads nowhere: `.`, `..` and empty parts.
fn plain(path: &[u8]) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = Vec::new();
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    [b"/", &parts.join(&b'/')[..]].concat()
}

impl Names {
    /// Reads them. A table that cannot be read names nobody.
    pub(crate) fn read() -> Self {
        let names = |path| {
            let table = read(path).unwrap_or_default();
            let named = |line: Vec<&[u8]>| Some((number(line.get(2)?)?, line[0].to_vec()));
            lines(&table).filter_map(named).collect()
        };
        Self { users: names(PASSWD), groups: names(GROUP) }
    }

    /// Returns what a user is called, by its number if by nothing else.
    pub(crate) fn user(&self, uid: u32) -> Vec<u8> {
        name_in(&self.users, uid)
    }

    /// Returns what a group is called, by its number if by nothing else.
    pub(crate) fn group(&self, gid: u32) -> Vec<u8> {
        name_in(&self.groups, gid)
    }
}

fn name_in(names: &[(u32, Vec<u8>)], id: u32) -> Vec<u8> {
    let found = names.iter().find(|(known, _)| *known == id);
    found.map_or_else(|| id.to_string().into_bytes(), |(_, name)| name.clone())
}

fn read(path: &str) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_MAGICLINKS;
    let file = match rustix::fs::openat2(CWD, path, flags, Mode::empty(), resolve) {
        // Not a call for commands, as `sudo` is one; to them their own links are no danger.
        Err(Errno::NOSYS) => rustix::fs::open(path, flags, Mode::empty()),
        other => other,
    }?;
    if !FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode).is_file() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut table = Vec::new();
    File::from(file).take(MAX_TABLE).read_to_end(&mut table)?;
    Ok(table)
}

/// Splits a table into the fields of its lines; those without a name are none.
fn lines(table: &[u8]) -> impl Iterator<Item = Vec<&[u8]>> {
    table
        .split(|byte| *byte == b'\n')
        .map(|line| line.split(|byte| *byte == b':').collect::<Vec<_>>())
        .filter(|fields| (1..=MAX_NAME).contains(&fields[0].len()))
}

fn number(field: &[u8]) -> Option<u32> {
    let digits = field.iter().all(u8::is_ascii_digit);
    str::from_utf8(field).ok().filter(|_| digits)?.parse().ok()
}

fn find_in(passwd: &[u8], groups: &[u8], called: &[u8]) -> Option<User> {
    let by_name = lines(passwd).find(|fields| fields[0] == called);
    let found = match by_name.or_else(|| by_number(passwd, number(called)?)) {
        Some(found) => found,
        None => return nameless(number(called)?),
    };
    let name = found[0];
    let (uid, gid) = (number(found.get(2)?)?, number(found.get(3)?)?);
    let home = found.get(5).copied().unwrap_or_default();
    let fine = home.starts_with(b"/") && home.len() <= MAX_HOME && !home.contains(&0);
    let member = |fields: &Vec<&[u8]>| {
        let members = fields.get(3).copied().unwrap_or_default();
        members.split(|byte| *byte == b',').any(|member| member == name)
    };
    let more = lines(groups).filter(member).filter_map(|fields| number(fields.get(2)?));
    let mut all = vec![gid];
    all.extend(more.filter(|more| *more != gid).take(MAX_GROUPS - 1));
    let home = if fine { home.to_vec() } else { b"/".to_vec() };
    let shell = found.get(6).copied().unwrap_or_default().to_vec();
    Some(User { name: name.to_vec(), uid, gid, groups: all, home, shell })
}

fn by_number(passwd: &[u8], uid: u32) -> Option<Vec<&[u8]>> {
    lines(passwd).find(|fields| fields.get(2).and_then(|field| number(field)) == Some(uid))
}

/// Returns one that no table knows, in the group of root as engines of containers have it.
fn nameless(uid: u32) -> Option<User> {
    let name = uid.to_string().into_bytes();
    let (home, shell) = (b"/".to_vec(), b"/bin/sh".to_vec());
    (uid < RANGE).then(|| User { name, uid, gid: 0, groups: vec![0], home, shell })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/sh\n:x:1:1::/:\nbad:x:y:0::/:\nshort\n\
        user:x:1000:1001:U:/home/user:/bin/sh\nodd:x:7:8::relative:\n";
    const GROUP: &[u8] = b"root:x:0:\nsudo:x:27:user,odd\nuser:x:1001:user\nbroken\nx:x:z:user\n";

    #[test]
    fn a_user_is_found_with_its_groups_and_its_home() {
        let user = find_in(PASSWD, GROUP, b"user").unwrap();
        assert_eq!((user.uid, user.gid, &user.groups[..]), (1000, 1001, &[1001, 27][..]));
        assert_eq!(user.home, b"/home/user");
        assert_eq!(find_in(PASSWD, GROUP, b"odd").unwrap().home, b"/", "a home is absolute");
        assert_eq!(find_in(PASSWD, GROUP, b"1000"), Some(user), "by its number");
        let unknown = find_in(PASSWD, GROUP, b"4242").unwrap();
        assert_eq!((unknown.uid, unknown.gid, &unknown.home[..]), (4242, 0, &b"/"[..]));
        for nobody in [&b""[..], b"bad", b"short", b"use", b"user:x", b"65536", b"-1", b"+5"] {
            assert_eq!(find_in(PASSWD, GROUP, nobody), None);
        }
    }

    #[test]
    fn a_path_may_begin_at_the_home() {
        let user = find_in(PASSWD, GROUP, b"user").unwrap();
        for (path, wanted) in [
            (&b"/a/../b"[..], Some(&b"/a/../b"[..])),
            (b"a/b", Some(b"/home/user/a/b")),
            (b"", Some(b"/home/user")),
            (b"~", Some(b"/home/user")),
            (b"~/a/./b", Some(b"/home/user/a/b")),
            (b"../../../etc", Some(b"/etc")),
            (b"~root", None),
        ] {
            assert_eq!(user.place(path).as_deref(), wanted, "{}", path.escape_ascii());
        }
    }

    #[test]
    fn ids_without_a_name_are_called_by_their_number() {
        let named = |line: Vec<&[u8]>| Some((number(line.get(2)?)?, line[0].to_vec()));
        let users: Vec<_> = lines(PASSWD).filter_map(named).collect();
        let names = Names { users, groups: Vec::new() };
        assert_eq!((names.user(1000), names.user(5)), (b"user".to_vec(), b"5".to_vec()));
    }
}
