//! What the arguments ask for, in the terms of the library.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use warren::template::Template;
use warren::{
    BindMount, Command, CreateOptions, Guarantee, HostTools, Limit, ResourceLimits, SandboxSpec,
};

use crate::args::RunArgs;
use crate::failure::Failure;
use crate::program::{self, Caller};
use crate::units::Cap;

/// A sandbox and the command to run in it.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) spec: SandboxSpec,
    pub(crate) options: CreateOptions,
    pub(crate) command: Command,
    /// What the caller should know and need not act on.
    pub(crate) notes: Vec<String>,
}

impl Request {
    /// Decides; what makes no sense is refused before anything is made.
    pub(crate) fn new(
        args: &RunArgs,
        template: Option<&Template>,
        caller: &Caller,
    ) -> Result<Self, Failure> {
        let mut options = CreateOptions {
            accept_missing: args.accept_missing.iter().copied().collect(),
            base: template.map(|template| template.base.clone()).unwrap_or_default(),
            ..CreateOptions::default()
        };
        let limits = limits(args, &mut options);
        if args.spec.require.contains(&Guarantee::Limits) {
            options.demanded = Limit::ALL.into();
        }
        let binds = args.spec.bind.iter().map(|bind| {
            let source = absolute(caller, &bind.source)?;
            Ok(BindMount { source, ..bind.clone() })
        });
        let paths = |paths: &[PathBuf]| {
            paths.iter().map(|path| absolute(caller, path)).collect::<Result<Vec<_>, Failure>>()
        };
        let mut spec = SandboxSpec {
            profile: args.spec.profile.clone(),
            seccomp_profile: args.spec.seccomp.clone(),
            allowed_paths_ro: paths(&args.spec.ro)?,
            allowed_paths_rw: paths(&args.spec.rw)?,
            bind_mounts: binds.collect::<Result<_, Failure>>()?,
            allowed_network: args.spec.net.allow_net.clone(),
            network_enabled: args.spec.net.network,
            environment: args.spec.env.clone(),
            limits,
            ..SandboxSpec::default()
        };
        if let Some(workdir) = &args.spec.workdir {
            spec.workdir.clone_from(workdir);
        }
        if let Some(template) = template {
            template.defaults.apply(&mut spec);
        }
        spec.validate()?;
        options.validate()?;
        let (program, arguments) = match args.command.split_first() {
            Some((program, arguments)) => (program.clone(), arguments),
            None => (String::new(), &[][..]),
        };
        let mut command = Command::new(program).args(arguments);
        command.validate()?;
        let notes = match options.base.host_tools {
            HostTools::Shown => program::provide(&mut command, &mut spec, caller)?,
            // It has programs of its own.
            HostTools::Hidden => Vec::new(),
        };
        Ok(Self { spec, options, command, notes })
    }
}

/// Reads the limits; those given by name are demanded.
fn limits(args: &RunArgs, options: &mut CreateOptions) -> ResourceLimits {
    fn set<T: Copy>(
        demanded: &mut BTreeSet<Limit>,
        limit: Limit,
        given: Option<Cap<T>>,
        value: &mut Option<T>,
    ) {
        if let Some(cap) = given {
            *value = cap.bound();
            if value.is_some() {
                demanded.insert(limit);
            }
        }
    }
    let mut limits = ResourceLimits::default();
    let demanded = &mut options.demanded;
    set(demanded, Limit::Memory, args.spec.memory, &mut limits.max_memory_bytes);
    set(demanded, Limit::CpuTime, args.spec.cpu_time, &mut limits.max_cpu_time_ms);
    set(demanded, Limit::WallTime, args.spec.timeout, &mut limits.max_wall_time_ms);
    set(demanded, Limit::Processes, args.spec.pids, &mut limits.max_processes);
    set(demanded, Limit::OpenFiles, args.spec.open_files, &mut limits.max_open_files);
    set(demanded, Limit::Output, args.spec.max_output, &mut limits.max_output_bytes);
    set(demanded, Limit::Write, args.spec.disk, &mut limits.max_write_bytes);
    set(demanded, Limit::CpuWeight, args.spec.cpu_weight, &mut limits.cpu_weight);
    set(demanded, Limit::CpuQuota, args.cpus, &mut options.cpu_quota_millis);
    limits
}

/// Paths of the host count from where the caller stands.
pub(crate) fn absolute(caller: &Caller, path: &Path) -> Result<PathBuf, Failure> {
    let joined = match &caller.directory {
        _ if path.is_absolute() => path.to_owned(),
        Some(directory) => directory.join(path),
        None => {
            let message = format!("`{}` is relative to a directory that is gone", path.display());
            return Err(Failure::usage(message, "write an absolute path, or change the directory"));
        }
    };
    // `.` and doubled slashes go; `..` stays and is refused.
    Ok(joined.components().collect())
}
