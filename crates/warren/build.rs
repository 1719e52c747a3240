//! Turns `profiles/` into Rust: checks the sandbox and seccomp profiles, compiles the filters for the target and
//! writes both as tables that `src/profile.rs` includes.
//!
//! A profile with a mistake in it (an unknown call or field, a rule without a reason, a blocked call that a filter lets
//! through) fails the build and names its file and entry. Nothing of TOML or of call names is left in the binary.
//!
//! Compiles the builtin that a driven bash is given (`src/shell/told.c`).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use warren_sys::seccomp::{
    Action, Arch, Comparison, Condition, Instruction, Rule, compile, outcomes,
};

type Result<T> = std::result::Result<T, String>;

/// The errnos that a profile may name; they are the same numbers on both architectures.
const ERRNOS: [(&str, u16); 5] = [
    ("EPERM", 1),
    ("ENOSYS", 38),
    ("EPROTONOSUPPORT", 93),
    ("EOPNOTSUPP", 95),
    ("EAFNOSUPPORT", 97),
];

/// What a call gets that we know and no rule allows.
const REFUSED: Action = Action::Errno(1);
/// What a number gets that we do not know.
const UNKNOWN: Action = Action::Errno(38);

const ARCHES: [Arch; 2] = [Arch::X86_64, Arch::Aarch64];

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../profiles");
    println!("cargo::rerun-if-changed={}", root.display());
    match generate(&root).and_then(|()| build_told()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("cargo::error={}", why.trim_end().replace('\n', "; "));
            ExitCode::FAILURE
        }
    }
}

/// Makes a shared object of `told.c`, for any bash of the target whatever its C library.
fn build_told() -> Result<()> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/shell/told.c");
    println!("cargo::rerun-if-changed={}", source.display());
    let out = Path::new(&env::var("OUT_DIR").map_err(text)?).join("told.so");
    let compiler = cc::Build::new().opt_level(2).debug(false).try_get_compiler().map_err(text)?;
    let mut command = compiler.to_command();
    command.args(["-shared", "-fPIC", "-nostdlib", "-ffreestanding", "-fno-stack-protector"]);
    command.args(["-s", "-Wl,-z,noexecstack", "-o"]);
    match command.arg(&out).arg(&source).status() {
        Ok(status) if status.success() => Ok(()),
        other => Err(format!("cannot compile {}: {other:?}", source.display())),
    }
}

fn generate(root: &Path) -> Result<()> {
    let target = match env::var("CARGO_CFG_TARGET_ARCH").as_deref() {
        Ok("x86_64") => Arch::X86_64,
        Ok("aarch64") => Arch::Aarch64,
        other => return Err(format!("no system call table for the target {other:?}")),
    };
    let filters = load_all::<SeccompFile>(&root.join("seccomp"))?;
    let mut source = String::new();
    let mut tested = String::new();
    writeln!(source, "static SECCOMP: &[Seccomp] = &[").map_err(text)?;
    for name in filters.keys() {
        let list = List::gather(&filters, name)?;
        for arch in ARCHES {
            let filter = list.compile(arch)?;
            let (init, workload) = (encoded(&filter.init), encoded(&filter.workload));
            if arch == target {
                let categories: Vec<_> = list.blocked.keys().collect();
                writeln!(source, "Seccomp {{ name: {name:?}, init: {init}, workload: {workload}, blocked_categories: &{categories:?} }},").map_err(text)?;
            }
            writeln!(tested, "(Arch::{arch:?}, {name:?}, {init}, {workload}),").map_err(text)?;
        }
    }
    writeln!(source, "];\n{}", profiles(root, &filters)?).map_err(text)?;
    write!(
        source,
        "/// The system calls known, by name: numbers on x86-64 and aarch64.\n\
         pub(crate) static CALLS: &[(&str, Option<u32>, Option<u32>)] = &{:?};\n\n\
         #[cfg(test)]\nmod compiled {{\n    use super::*;\n    pub(super) use super::CALLS;\n\n    \
         /// Every filter for every architecture: (architecture, name, init, workload).\n    \
         pub(super) static FILTERS: &[(Arch, &str, &[Instruction], &[Instruction])] = &[\n{tested}];\n    \
         pub(super) static ERRNOS: &[(&str, u16)] = &{ERRNOS:?};\n}}\n",
        calls()
    )
    .map_err(text)?;
    let out = env::var_os("OUT_DIR").map(PathBuf::from).ok_or("OUT_DIR is not set")?;
    fs::write(out.join("profiles.rs"), source).map_err(text)
}

fn text(error: impl ToString) -> String {
    error.to_string()
}

fn encoded(program: &[Instruction]) -> String {
    let instructions: Vec<_> = program
        .iter()
        .map(|instruction| format!("Instruction::from_bits({:#x})", instruction.to_bits()))
        .collect();
    format!("&[{}]", instructions.join(", "))
}

/// Reads every TOML file of a directory, by its name without the extension.
fn load_all<T: DeserializeOwned>(directory: &Path) -> Result<BTreeMap<String, T>> {
    let mut files = BTreeMap::new();
    let entries = fs::read_dir(directory).map_err(|e| format!("{}: {e}", directory.display()))?;
    for entry in entries {
        let path = entry.map_err(text)?.path();
        if path.extension().is_none_or(|extension| extension != "toml") {
            continue;
        }
        let named = |error: String| format!("{}: {error}", path.display());
        let content = fs::read_to_string(&path).map_err(text).map_err(named)?;
        let parsed = toml::from_str(&content).map_err(text).map_err(named)?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        files.insert(stem, parsed);
    }
    Ok(files)
}

/// Returns the files that `name` stands on, the first one first.
fn chain<'a, T>(
    files: &'a BTreeMap<String, T>,
    name: &'a str,
    extends: impl Fn(&T) -> Option<&str>,
) -> Result<Vec<(&'a str, &'a T)>> {
    let mut chain: Vec<(&str, &T)> = Vec::new();
    let mut next = Some(name);
    while let Some(wanted) = next {
        let by = chain.last().map_or("", |(name, _)| name);
        let (wanted, file) = files
            .get_key_value(wanted)
            .ok_or_else(|| format!("{by}.toml: extends the unknown `{wanted}`"))?;
        if chain.iter().any(|(seen, _)| seen == wanted) {
            return Err(format!("{by}.toml: extends itself by way of `{wanted}`"));
        }
        chain.push((wanted, file));
        next = extends(file);
    }
    chain.reverse();
    Ok(chain)
}

// --- Seccomp --------------------------------------------------------------------------------------------------------

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SeccompFile {
    extends: Option<String>,
    #[serde(default)]
    unblock: Vec<String>,
    #[serde(default)]
    allow: Vec<Entry>,
    #[serde(default)]
    deny: Vec<Denial>,
    #[serde(default)]
    init: Vec<InitOnly>,
    #[serde(default)]
    blocked: Vec<Blocked>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    reason: String,
    syscalls: Vec<String>,
    #[serde(default)]
    when: Vec<When>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Denial {
    errno: String,
    reason: String,
    syscalls: Vec<String>,
    #[serde(default)]
    when: Vec<When>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct InitOnly {
    reason: String,
    syscalls: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Blocked {
    category: String,
    reason: String,
    syscalls: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct When {
    arg: u8,
    mask: Option<u32>,
    #[serde(default)]
    wide: bool,
    equals: Option<Values>,
    differs: Option<Values>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Values {
    One(u32),
    Many(Vec<u32>),
}

impl Values {
    fn as_slice(&self) -> &[u32] {
        match self {
            Self::One(value) => std::slice::from_ref(value),
            Self::Many(values) => values,
        }
    }
}

/// The rules of one call, by the order in which they are asked.
#[derive(Debug, Default)]
struct CallRules {
    refused_when: Vec<(Action, Vec<Condition>)>,
    allowed_when: Vec<Vec<Condition>>,
    allowed: bool,
    otherwise: Option<Action>,
}

/// A profile with all that it extends.
#[derive(Debug, Default)]
struct List<'a> {
    name: &'a str,
    calls: BTreeMap<&'a str, CallRules>,
    init: BTreeSet<&'a str>,
    blocked: BTreeMap<&'a str, Vec<&'a str>>,
}

#[derive(Debug)]
struct Filter {
    init: Vec<Instruction>,
    workload: Vec<Instruction>,
}

impl<'a> List<'a> {
    fn gather(files: &'a BTreeMap<String, SeccompFile>, name: &'a str) -> Result<Self> {
        let mut list = Self { name, ..Self::default() };
        for (name, file) in chain(files, name, |file| file.extends.as_deref())? {
            list.add(file).map_err(|why| format!("profiles/seccomp/{name}.toml: {why}"))?;
        }
        Ok(list)
    }

    fn add(&mut self, file: &'a SeccompFile) -> Result<()> {
        // What the extended file denies may be allowed here: that is what extending is for.
        let inherited: BTreeSet<_> = self
            .calls
            .iter()
            .filter_map(|(name, rules)| rules.otherwise.and(Some(*name)))
            .collect();
        for category in &file.unblock {
            self.blocked
                .remove(category.as_str())
                .ok_or_else(|| format!("unblock: no category `{category}` is blocked"))?;
        }
        for (index, Blocked { category, reason, syscalls }) in file.blocked.iter().enumerate() {
            let names = checked("blocked", index, reason, syscalls)?;
            if self.blocked.insert(category, names).is_some() {
                return Err(format!("[[blocked]] {}: `{category}` is there already", index + 1));
            }
        }
        for (index, Denial { errno, reason, syscalls, when }) in file.deny.iter().enumerate() {
            let at =
                |why: String| format!("[[deny]] {} ({}): {why}", index + 1, syscalls.join(", "));
            let &(_, errno) = ERRNOS
                .iter()
                .find(|(name, _)| name == errno)
                .ok_or_else(|| at(format!("unknown errno `{errno}`")))?;
            let alternatives = alternatives(when).map_err(at)?;
            for name in checked("deny", index, reason, syscalls)? {
                let rules = self.calls.entry(name).or_default();
                let action = Action::Errno(errno);
                if when.is_empty() {
                    if rules.otherwise.replace(action).is_some() {
                        return Err(at(format!("`{name}` is denied already")));
                    }
                } else {
                    let cases = alternatives.iter().map(|conditions| (action, conditions.clone()));
                    rules.refused_when.extend(cases);
                }
            }
        }
        for (index, Entry { reason, syscalls, when }) in file.allow.iter().enumerate() {
            let at =
                |why: String| format!("[[allow]] {} ({}): {why}", index + 1, syscalls.join(", "));
            let alternatives = alternatives(when).map_err(at)?;
            for name in checked("allow", index, reason, syscalls)? {
                let rules = self.calls.entry(name).or_default();
                if rules.allowed {
                    return Err(at(format!("`{name}` is allowed already")));
                }
                if when.is_empty() {
                    rules.allowed = true;
                } else {
                    rules.allowed_when.extend(alternatives.iter().cloned());
                }
            }
        }
        for (index, InitOnly { reason, syscalls }) in file.init.iter().enumerate() {
            self.init.extend(checked("init", index, reason, syscalls)?);
        }
        for (name, rules) in &mut self.calls {
            if rules.allowed && rules.otherwise.take().is_some() && !inherited.contains(name) {
                return Err(format!("`{name}` is both allowed and denied, each without `when`"));
            }
        }
        Ok(())
    }

    fn compile(&self, arch: Arch) -> Result<Filter> {
        let table = table(arch);
        let (mut init, mut workload) = (Vec::new(), Vec::new());
        for (&name, &nr) in &table {
            let rules = self.calls.get(name).map_or_else(Vec::new, |rules| rules.list(nr));
            let decided = rules.last().is_some_and(|rule| rule.when.is_empty());
            let refusal = (!decided).then(|| Rule { nr, action: REFUSED, when: Vec::new() });
            let rules = rules.into_iter().chain(refusal);
            let open = self.calls.get(name).is_some_and(|rules| rules.allowed);
            if self.init.contains(name) && !open {
                init.push(Rule { nr, action: Action::Allow, when: Vec::new() });
                workload.extend(rules);
            } else {
                init.extend(rules);
            }
        }
        let at = |why: String| format!("profiles/seccomp/{}.toml: {why} ({arch:?})", self.name);
        let filter = Filter {
            init: compile(arch, UNKNOWN, &init).map_err(text).map_err(at)?,
            workload: compile(arch, Action::Allow, &workload).map_err(text).map_err(at)?,
        };
        for (category, names) in &self.blocked {
            for &name in names {
                let Some(&nr) = table.get(name) else { continue };
                let passes = |program| outcomes(program, arch.audit(), nr).contains(&Action::Allow);
                if passes(&filter.init) && passes(&filter.workload) {
                    return Err(at(format!("[[blocked]] `{category}`: `{name}` is allowed")));
                }
            }
        }
        Ok(filter)
    }
}

impl CallRules {
    fn list(&self, nr: u32) -> Vec<Rule> {
        let refused = self.refused_when.iter().cloned();
        let allowed = self.allowed_when.iter().map(|when| (Action::Allow, when.clone()));
        let always = self.allowed.then_some(Action::Allow).or(self.otherwise);
        refused
            .chain(allowed)
            .chain(always.map(|action| (action, Vec::new())))
            .map(|(action, when)| Rule { nr, action, when })
            .collect()
    }
}

/// Checks what all entries have in common and returns the names.
fn checked<'a>(
    kind: &str,
    index: usize,
    reason: &str,
    syscalls: &'a [String],
) -> Result<Vec<&'a str>> {
    let entry = format!("[[{kind}]] {} ({})", index + 1, syscalls.join(", "));
    if reason.trim().is_empty() {
        return Err(format!("{entry}: has no reason"));
    }
    if syscalls.is_empty() {
        return Err(format!("{entry}: names no system call"));
    }
    let mut seen = BTreeSet::new();
    for name in syscalls.iter().map(String::as_str) {
        if ARCHES.iter().all(|&arch| !table(arch).contains_key(name)) {
            return Err(format!("{entry}: no architecture has a system call `{name}`"));
        }
        if !seen.insert(name) {
            return Err(format!("{entry}: names `{name}` twice"));
        }
    }
    Ok(syscalls.iter().map(String::as_str).collect())
}

/// Writes "one of" as several lists of conditions, of which one must hold.
fn alternatives(when: &[When]) -> Result<Vec<Vec<Condition>>> {
    let mut lists = vec![Vec::new()];
    for When { arg, mask, wide, equals, differs } in when {
        if *wide && mask.is_some() {
            return Err("a `when` is either `wide` or has a `mask`".to_owned());
        }
        let condition = |comparison, value: u32| Condition {
            argument: *arg,
            // The low half, unless it is `wide`: strict.toml says why.
            mask: if *wide { u64::MAX } else { u64::from(mask.unwrap_or(u32::MAX)) },
            comparison,
            value: u64::from(value),
        };
        match (equals, differs) {
            (Some(values), None) => {
                let mut longer = Vec::new();
                for &value in values.as_slice() {
                    for list in &lists {
                        let mut list = list.clone();
                        list.push(condition(Comparison::Equal, value));
                        longer.push(list);
                    }
                }
                lists = longer;
            }
            (None, Some(values)) => {
                for &value in values.as_slice() {
                    lists
                        .iter_mut()
                        .for_each(|list| list.push(condition(Comparison::NotEqual, value)));
                }
            }
            _ => return Err("a `when` needs either `equals` or `differs`".to_owned()),
        }
    }
    if lists.is_empty() {
        return Err("a `when` with no value never holds".to_owned());
    }
    Ok(lists)
}

/// Returns the system call table of an architecture.
fn table(arch: Arch) -> BTreeMap<&'static str, u32> {
    // Not `Sysno::iter`: in syscalls 0.8.1 it leaves out the last call.
    let numbers = 0..1024;
    match arch {
        Arch::X86_64 => {
            use syscalls::x86_64::Sysno;
            numbers.filter_map(|nr| Some((Sysno::new(nr as usize)?.name(), nr))).collect()
        }
        Arch::Aarch64 => {
            use syscalls::aarch64::Sysno;
            numbers.filter_map(|nr| Some((Sysno::new(nr as usize)?.name(), nr))).collect()
        }
    }
}

fn calls() -> Vec<(&'static str, Option<u32>, Option<u32>)> {
    let (x86_64, aarch64) = (table(Arch::X86_64), table(Arch::Aarch64));
    let names: BTreeSet<_> = x86_64.keys().chain(aarch64.keys()).copied().collect();
    names
        .into_iter()
        .map(|name| (name, x86_64.get(name).copied(), aarch64.get(name).copied()))
        .collect()
}

// --- Sandbox profiles -------------------------------------------------------------------------------------------------

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProfileFile {
    extends: Option<String>,
    summary: String,
    seccomp: String,
    proc_pids_only: bool,
    tcp: bool,
    #[serde(default)]
    several_users: bool,
    #[serde(default)]
    capability: Vec<Capability>,
    #[serde(default)]
    host: Vec<Host>,
    #[serde(default)]
    proc_mask: Vec<ProcPath>,
    #[serde(default)]
    proc_readonly: Vec<ProcPath>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Host {
    path: String,
    required: bool,
    reason: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Capability {
    name: String,
    reason: String,
}

/// What root of a sandbox may be given at all, with the bit of capabilities(7): all of it concerns the
/// sandbox's own files, processes and ports, and none of it opens kernel code that others cannot reach.
const CAPABILITIES: [(&str, u32); 8] = [
    ("chown", 0),
    ("dac_override", 1),
    ("fowner", 3),
    ("fsetid", 4),
    ("kill", 5),
    ("setgid", 6),
    ("setuid", 7),
    ("net_bind_service", 10),
];

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProcPath {
    path: String,
    reason: String,
}

fn profiles(root: &Path, filters: &BTreeMap<String, SeccompFile>) -> Result<String> {
    let files = load_all::<ProfileFile>(root)?;
    let mut source =
        format!("static CAPABILITIES: [(&str, u32); {}] = {CAPABILITIES:?};\n", CAPABILITIES.len());
    source.push_str("static PROFILES: &[Profile] = &[\n");
    for (name, file) in &files {
        let ProfileFile { summary, seccomp, proc_pids_only, tcp, .. } = file;
        if !filters.contains_key(seccomp) {
            return Err(format!("profiles/{name}.toml: unknown seccomp profile `{seccomp}`"));
        }
        let (mut host, mut masked, mut readonly) = (Vec::new(), Vec::new(), Vec::new());
        for (name, file) in chain(&files, name, |file| file.extends.as_deref())? {
            let at = |why: String| format!("profiles/{name}.toml: {why}");
            for Host { path, required, reason } in &file.host {
                let relative = path.strip_prefix('/').unwrap_or_default();
                check_path("host", relative, path, reason).map_err(at)?;
                host.push(format!("HostPath {{ path: {path:?}, required: {required} }}"));
            }
            let lists = [
                ("proc_mask", &file.proc_mask, &mut masked),
                ("proc_readonly", &file.proc_readonly, &mut readonly),
            ];
            for (kind, entries, list) in lists {
                for ProcPath { path, reason } in entries {
                    check_path(kind, path, path, reason).map_err(at)?;
                    list.push(path.as_str());
                }
            }
        }
        let users = users(file).map_err(|why| format!("profiles/{name}.toml: {why}"))?;
        let mut seen = BTreeSet::new();
        let paths = masked.iter().chain(&readonly).copied().chain(host.iter().map(String::as_str));
        if let Some(twice) = paths.into_iter().find(|&path| !seen.insert(path)) {
            return Err(format!("profiles/{name}.toml: `{twice}` is there twice"));
        }
        writeln!(
            source,
            "Profile {{ name: {name:?}, summary: {summary:?}, seccomp: {seccomp:?}, host: &[{}], \
             proc_masked: &{masked:?}, proc_readonly: &{readonly:?}, proc_pids_only: {proc_pids_only}, tcp: {tcp}, \
             users: {users} }},",
            host.join(", ")
        )
        .map_err(text)?;
    }
    source.push_str("];\n");
    Ok(source)
}

/// Returns which users a profile has, as source. Nothing of it is inherited: each profile says so itself.
fn users(file: &ProfileFile) -> Result<String> {
    if !file.several_users {
        return match file.capability.first() {
            Some(Capability { name, .. }) => Err(format!("`{name}` is of no use without root")),
            None => Ok("ProfileUsers::One".to_owned()),
        };
    }
    let mut bits = 0_u64;
    for Capability { name, reason } in &file.capability {
        let known = CAPABILITIES.iter().find(|(known, _)| known == name);
        let (_, bit) =
            known.ok_or_else(|| format!("[[capability]] `{name}`: not for a sandbox"))?;
        if reason.trim().is_empty() {
            return Err(format!("[[capability]] `{name}`: has no reason"));
        }
        bits |= 1 << bit;
    }
    Ok(format!("ProfileUsers::Several {{ capabilities: {bits:#x} }}"))
}

/// Refuses a path that is empty, not normal or on the wrong side of the root, and a missing reason.
fn check_path(kind: &str, relative: &str, path: &str, reason: &str) -> Result<()> {
    if relative.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Err(format!("[[{kind}]] `{path}`: not a normal path of the expected kind"));
    }
    if reason.trim().is_empty() {
        return Err(format!("[[{kind}]] `{path}`: has no reason"));
    }
    Ok(())
}
