//! The life of init: runs commands, watches over them, reaps everybody's orphans.
//!
//! One loop, no threads. Each command has a socket of its own to whoever asked for it; when that
//! closes, the command and all it started are ended.

use std::cell::OnceCell;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};
use warren_sys::process::{self, End, SingleThreaded};
use warren_sys::seccomp::Instruction;
use warren_sys::socket;

use crate::account::{Census, Leaf, Meter, Seen, Work};
use crate::apply::Inherited;
use crate::exec::{Ends, Refusal, Ruled, Spare, Started, Starter};
use crate::explain::Follower;
use crate::gate::Gate;
use crate::launcher::{drain, is_about_one_message};
use crate::log::Room;
use crate::logged::Logged;
use crate::names::{self, Names};
use crate::plan::{COMMAND_BITS, INIT_ID, Lifetime, Plan, WORKLOAD_ID, Walls};
use crate::protocol::denied::{Denials, Refused};
use crate::protocol::{
    self, Done, Ended, Exec, ExecControl, ExecEvent, Input, Request, Stage, Standing, Status,
    StoppedBy, Streams, Used,
};
use crate::refusals::{self, Refusals};
use crate::terminal::{self, Terminal};
use crate::worker::Workers;
use crate::{port, probe, sentry};

/// How often memory is looked at where no cgroup bounds it.
const MEMORY_INTERVAL: Duration = Duration::from_millis(20);
/// How long nothing happens before the process of the next command is made.
const PREPARE_AFTER: Duration = Duration::from_micros(500);
/// The shortest time between two looks at the CPU time of a command.
const CPU_INTERVAL: Duration = Duration::from_millis(5);

/// What becomes of one who may ask, after a look at what it said.
enum Asked {
    More,
    Gone,
    End,
}

/// A command that runs.
struct Running {
    pid: Pid,
    /// To whoever asked for it, as long as it listens.
    channel: Option<OwnedFd>,
    /// There until its program is known to run.
    starting: Option<Started>,
    /// Whether somebody waits to hear that it does; else it is looked at when it has ended.
    announced: bool,
    /// What it could not do, if its program does not run.
    refused: Option<Refusal>,
    terminal: Option<OwnedFd>,
    /// The reading ends of its output, should whoever reads them go.
    spare: Vec<OwnedFd>,
    leaf: Option<Leaf>,
    mark: u64,
    started: Instant,
    deadline: Option<Instant>,
    cpu_limit: Option<Duration>,
    next_cpu_look: Option<Instant>,
    /// CPU time of its orphans that init reaped, where no cgroup counts it.
    orphans_cpu: Duration,
    stopped_by: Option<StoppedBy>,
    /// How often what it started was ended for its memory.
    memory_kills: u64,
    /// For how long it stood still with its sandbox.
    stood_still: Duration,
    /// When it is over although its first process cannot die.
    given_up: Option<Instant>,
    /// Whether the sandbox ends with it.
    only: bool,
    /// The first number that a process got that it started, or that it got itself.
    first_number: u64,
    /// Who sees what walls refuse to it, if somebody asked for that.
    follower: Option<Follower>,
    /// The calls that its filter refused and the names that were refused to it, as far as init hears of them.
    refused_here: Denials,
}

/// A command that was begun.
struct Begun {
    starting: Started,
    leaf: Option<Leaf>,
    mark: u64,
    first_number: u64,
    follower: Option<Follower>,
}

impl Running {
    /// Returns what tells that its program runs, if somebody waits for that.
    fn watched_start(&self) -> Option<&Started> {
        self.starting.as_ref().filter(|_| self.announced)
    }

    /// Returns what there is to tell of the walls that it met: all of it if it was followed, and what init
    /// heard itself if it failed.
    fn denials(&self, status: Status) -> Option<Denials> {
        match &self.follower {
            Some(follower) => {
                let mut told = follower.told();
                told.append(&self.refused_here);
                Some(told)
            }
            None if status == Status::Exited(0) || self.refused_here.list.is_empty() => None,
            None => Some(self.refused_here.clone()),
        }
    }
}

struct Init<'a> {
    plan: &'a Plan,
    starter: Starter,
    meter: Meter,
    census: Census,
    refusals: Option<Refusals>,
    names: Option<Names>,
    gate: Option<Gate>,
    work: Option<Work>,
    running: HashMap<Pid, Running>,
    /// Groups of commands that ended but left something running.
    lingering: Vec<Leaf>,
    /// Commands that were ended, and of which something is not gone yet.
    ending: Vec<Ending>,
    next_mark: u64,
    suspended: Option<Instant>,
    next_memory_look: Option<Instant>,
    /// The process that is to become the next command, and when one is to be made.
    spare: Option<Spare>,
    prepare_at: Option<Instant>,
    /// The streams of commands with a log, by their marks; some may outlive their command.
    logs: BTreeMap<u64, Logged>,
    /// Output that nobody reads any more but something may still write to.
    unread: Vec<OwnedFd>,
    /// Output of commands that ended, with the socket of the one who reads it, until that closes.
    reading: Vec<(OwnedFd, Vec<OwnedFd>)>,
    /// Those who may ask for something.
    controls: Vec<OwnedFd>,
    listener: Option<OwnedFd>,
    /// To the one who guards a sandbox with a kernel of its own, and hands in who comes to it.
    line: Option<OwnedFd>,
    cpus: u32,
    workers: Workers,
    /// The filesystem of everything that is written. Nothing of it can be opened by init itself.
    scratch: Option<OwnedFd>,
    written: Option<OwnedFd>,
}

/// A command whose first process is gone, after it was ended with all it started.
struct Ending {
    running: Running,
    end: End,
    usage: process::Usage,
    transferred: (u64, u64),
    /// When it is over even if something of it cannot die.
    until: Instant,
}

/// How long a killed process may take to be gone before its command is said to have ended.
const DYING: Duration = Duration::from_secs(2);

/// How many may hold a conversation with one init; there is one daemon, and perhaps its successor.
const MAX_CONTROLS: usize = 8;

/// What init took hold of before it locked itself in.
#[derive(Debug)]
pub(crate) struct Kept {
    /// The filesystem of everything that is written, if it can be handed out.
    pub(crate) scratch: Option<OwnedFd>,
    pub(crate) meter: Meter,
    pub(crate) census: Census,
    /// What hears of refused calls, if anything does.
    pub(crate) refusals: Option<Refusals>,
    /// The way to what may be reached, if anything may.
    pub(crate) gate: Option<Gate>,
    /// On a kernel of its own: that kernel's groups, and the line to the one who guards it.
    pub(crate) own: Option<(Work, OwnedFd)>,
    /// A directory that is written to, on a kernel where a path may not be walked while somebody else walks one on a
    /// file system of the host's that does not answer.
    pub(crate) written: Option<OwnedFd>,
}

/// Serves until nobody is there to serve.
pub(crate) fn serve(plan: &Plan, control: &OwnedFd, inherited: Inherited, kept: Kept) {
    let Kept { scratch, meter, census, refusals, gate, own, written } = kept;
    let (own_work, line) = own.unzip();
    let Ok(proof) = SingleThreaded::claim() else { return };
    let Ok(children) = process::child_events() else { return };
    let program = |bits: &Vec<u64>| bits.iter().copied().map(Instruction::from_bits).collect();
    let filters = plan.filter.workload.iter().map(program).collect();
    let Ok(control) = control.try_clone() else { return };
    let (owner, ruled) = match &plan.walls {
        Walls::Namespaces | Walls::OwnKernel => (plan.identity.init_id(), None),
        Walls::Rules(rules) => {
            let user = inherited.base.map(|base| base + WORKLOAD_ID);
            let owner = inherited.base.map_or(0, |base| base + INIT_ID);
            (owner, Some(Ruled { user, file_bytes: rules.file_bytes }))
        }
    };
    let nonce = match &plan.walls {
        Walls::Namespaces | Walls::OwnKernel => 0,
        Walls::Rules(rules) => rules.nonce,
    };
    let rightful = plan.walls == Walls::OwnKernel;
    // Of the launcher's, or of the warden's, which outlives nobody.
    let bound = plan.lifetime == Lifetime::Attached || ruled.is_some();
    let on_parents_death = bound.then_some(Signal::KILL);
    let Inherited { work, listener, lock: _lock, names, .. } = inherited;
    let mut work = work.map(|group| Work::new(group, owner, on_parents_death)).or(own_work);
    if plan.cgroups.parted {
        work.iter_mut().for_each(Work::part);
    }
    let mut init = Init {
        plan,
        starter: Starter {
            proof,
            init_filter: program(&plan.filter.init),
            filters,
            followed: OnceCell::new(),
            nice: plan.bounds.nice,
            users: plan.users,
            no_tracing: plan.promised.no_tracing,
            ruled,
            rightful,
        },
        meter,
        census,
        refusals,
        names,
        gate,
        work,
        running: HashMap::new(),
        lingering: Vec::new(),
        ending: Vec::new(),
        next_mark: (nonce << COMMAND_BITS) + 1,
        suspended: None,
        next_memory_look: None,
        spare: None,
        prepare_at: None,
        logs: BTreeMap::new(),
        unread: Vec::new(),
        reading: Vec::new(),
        controls: vec![control],
        listener,
        line,
        workers: Workers::default(),
        scratch,
        written,
        // Not `available_parallelism`, which reads mounts and groups for a quota.
        cpus: rustix::thread::sched_getaffinity(None).map_or(1, |cpus| cpus.count().max(1)),
    };
    init.work.iter_mut().for_each(Work::prepare);
    init.prepare_soon();
    while init.turn(&children) {}
}

impl Init<'_> {
    /// Waits for something to happen and deals with it; `false` when it is over.
    fn turn(&mut self, children: &OwnedFd) -> bool {
        let pids: Vec<Pid> = self.running.keys().copied().collect();
        let mut fds = vec![PollFd::new(children, PollFlags::IN)];
        fds.extend(self.controls.iter().map(|control| PollFd::new(control, PollFlags::IN)));
        for pid in &pids {
            let running = &self.running[pid];
            let starting = running.watched_start().map(AsFd::as_fd);
            let ends = [running.channel.as_ref().map(AsFd::as_fd), starting];
            let ends = ends.into_iter().flatten();
            fds.extend(ends.map(|end| PollFd::from_borrowed_fd(end, PollFlags::IN)));
        }
        fds.extend(self.listener.iter().map(|listener| PollFd::new(listener, PollFlags::IN)));
        fds.extend(self.line.iter().map(|line| PollFd::new(line, PollFlags::IN)));
        fds.extend(self.refusals.iter().map(|refusals| PollFd::new(refusals, PollFlags::IN)));
        fds.extend(self.names.iter().map(|names| PollFd::new(names, PollFlags::IN)));
        let gate = self.gate.iter().flat_map(Gate::watched);
        fds.extend(gate.map(|(fd, flags)| PollFd::new(fd, flags)));
        fds.extend(self.unread.iter().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        fds.extend(self.reading.iter().map(|(channel, _)| PollFd::new(channel, PollFlags::IN)));
        let logged = self.logs.values().flat_map(Logged::watched);
        fds.extend(logged.map(|(fd, flags)| PollFd::from_borrowed_fd(fd, flags)));
        let rests = self.logs.values().filter_map(Logged::rests_until);
        let timeout = self.next_deadline().into_iter().chain(rests).min().map(|at| {
            let left = at.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return false,
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        // In the order in which they were put in above.
        let mut ready = ready.into_iter();
        let mut next = || ready.next().unwrap_or(false);
        let children_ready = next();
        let controls: Vec<bool> = self.controls.iter().map(|_| next()).collect();
        let commands: Vec<(bool, bool)> = pids
            .iter()
            .map(|pid| &self.running[pid])
            .map(|running| {
                (running.channel.is_some() && next(), running.watched_start().is_some() && next())
            })
            .collect();
        let accept = self.listener.is_some() && next();
        let handed_in = self.line.is_some() && next();
        let refused = self.refusals.is_some() && next();
        let asked_for_names = self.names.is_some() && next();
        let barred = self.gate.as_mut().map(|gate| gate.ready(&mut next)).unwrap_or_default();
        self.unread.retain(|pipe| !next() || discard(pipe));
        let done = |(channel, _): &mut (OwnedFd, Vec<OwnedFd>)| {
            next() && matches!(protocol::receive_trusted::<ExecControl>(&*channel), Ok(None))
        };
        let done: Vec<_> = self.reading.extract_if(.., done).collect();
        self.unread.extend(done.into_iter().flat_map(|(_, pipes)| pipes));
        let full = self
            .logs
            .iter_mut()
            .filter_map(|(mark, logged)| (logged.ready(&mut next) == Room::Full).then_some(*mark));
        for mark in full.collect::<Vec<_>>() {
            self.full(mark);
        }
        self.settle_logs();
        // Only now: what is asked may change what was watched.
        let mut heard = Vec::new();
        for (pid, (channel, starting)) in pids.into_iter().zip(commands) {
            if starting {
                self.started(pid);
            }
            if channel {
                heard.extend(self.hear(pid).map(|control| (pid, control)));
            }
        }
        // Whoever has stopped all commands does not wait for us to know. What was sent to one of them after that was
        // read just now, so the word of it is there, if it was not before.
        let controls = if heard.is_empty() { controls } else { self.waiting() };
        if !self.serve_controls(&controls) {
            return false;
        }
        for (pid, control) in heard {
            self.controlled(pid, control);
        }
        if refused {
            self.hear_refusals();
        }
        if asked_for_names {
            self.answer_names();
        }
        self.blame(barred);
        if accept {
            self.accept();
        }
        if handed_in && !self.take_in() {
            return false;
        }
        if children_ready {
            drain(children);
            self.reap();
        }
        self.watch();
        true
    }

    /// Answers calls that the filter refuses, and notes whose they were: a few at once, since commands can
    /// make as many as they like.
    fn hear_refusals(&mut self) {
        let Some(refusals) = &self.refusals else { return };
        for heard in std::iter::from_fn(|| refusals.next()).take(refusals::AT_ONCE) {
            // Looked at while it waits: afterwards its number may be another's.
            let mark = self.census.mark_of(heard.pid());
            if !refusals.refuse(&heard) {
                continue;
            }
            let owner = self.running.values_mut().find(|running| Some(running.mark) == mark);
            if let Some(owner) = owner {
                let (what, errno) = heard.told();
                owner.refused_here.add(what, errno);
            }
        }
    }

    /// Answers who asks for names, and notes those that were refused.
    fn answer_names(&mut self) {
        let (Some(names), gate) = (&self.names, &mut self.gate) else { return };
        let answer = || names.answer_next(gate.as_mut().map(Gate::book));
        let asked: Vec<_> = std::iter::from_fn(answer).take(names::AT_ONCE).flatten().collect();
        let asked = asked.into_iter().filter(|name| !name.is_empty()).inspect(|name| {
            if let Some(gate) = &mut self.gate {
                gate.tell_refused(name);
            }
        });
        let asked = asked.map(Refused::Name).collect();
        self.blame(asked);
    }

    /// Notes what the network refused, if only one could have wanted it: neither a datagram nor a connection says
    /// whose it is.
    fn blame(&mut self, refused: Vec<Refused>) {
        let mut commands = self.running.values_mut();
        let (Some(only), None) = (commands.next(), commands.next()) else { return };
        if self.lingering.is_empty() && self.ending.is_empty() {
            refused.into_iter().for_each(|what| only.refused_here.add(what, 0));
        }
    }

    /// Looks who has a request by now.
    fn waiting(&self) -> Vec<bool> {
        let watched = |control| PollFd::new(control, PollFlags::IN);
        let mut fds: Vec<_> = self.controls.iter().map(watched).collect();
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let _ = poll(&mut fds, Some(&at_once));
        fds.iter().map(|fd| !fd.revents().is_empty()).collect()
    }

    /// Takes a request from each who has one; `false` if the sandbox is to end.
    fn serve_controls(&mut self, ready: &[bool]) -> bool {
        // From the back, so that those not yet looked at keep their places.
        for index in (0..ready.len()).rev().filter(|index| ready[*index]) {
            match self.asked(index) {
                Asked::More => {}
                Asked::Gone => drop(self.controls.swap_remove(index)),
                Asked::End => return false,
            }
        }
        !self.controls.is_empty() || self.plan.lifetime == Lifetime::Detached
    }

    /// Lets somebody in who found the sandbox by its place on the host.
    fn accept(&mut self) {
        let Some(Ok(control)) = self.listener.as_ref().map(socket::accept) else { return };
        if self.controls.len() < MAX_CONTROLS {
            self.controls.push(control);
        }
    }

    /// Likewise, where its guard lets them in; `false` if the sandbox is to end with that guard.
    fn take_in(&mut self) -> bool {
        let Some(line) = &self.line else { return true };
        match sentry::handed_in(line) {
            Some(control) if self.controls.len() < MAX_CONTROLS => self.controls.extend(control),
            Some(_) => {}
            None => self.line = None,
        }
        self.line.is_some() || sentry::goes_on_alone(self.plan)
    }

    fn asked(&mut self, index: usize) -> Asked {
        let received = protocol::receive_trusted::<Request>(&self.controls[index]);
        let (request, mut fds) = match received {
            Ok(Some(message)) => message,
            // Out of descriptors for a moment, say: no reason to end what runs.
            Err(error) if is_about_one_message(&error) => return Asked::More,
            Ok(None) | Err(_) => return Asked::Gone,
        };
        if fds.is_empty() {
            self.told(&request);
            return Asked::More;
        }
        let reply = fds.remove(0);
        match request {
            Request::Exec(exec) => self.exec(&exec, reply, fds),
            Request::Follow(name) => self.follow(&name, reply, fds.pop()),
            Request::Suspend => answer(&reply, self.suspend()),
            Request::Resume => answer(&reply, self.resume()),
            Request::Probe(asked) => probe::run(&self.starter, &reply, &asked, None),
            Request::ProbeGently { probe, huge_pages } => {
                probe::run(&self.starter, &reply, &probe, Some(huge_pages));
            }
            Request::Hello => {
                let running = self.running.len().try_into().unwrap_or(u32::MAX);
                let left = self.lingering.iter().any(|leaf| !leaf.is_empty());
                let standing = Standing { suspended: self.suspended.is_some(), running, left };
                let _ = protocol::send(&reply, &standing, &[]);
            }
            Request::End => return Asked::End,
            Request::Connect { to, port } => port::connect(to, port, &reply),
            Request::Egress => {
                if let Some(gate) = &mut self.gate {
                    gate.lead_to(reply);
                }
            }
            Request::Scratch => match &self.scratch {
                Some(scratch) => drop(protocol::send(&reply, &Done(0), &[scratch.as_fd()])),
                None => answer(&reply, Err(Errno::OPNOTSUPP.into())),
            },
            Request::Files(request) => {
                let suspended = self.suspended.is_some();
                self.workers.start(&self.starter, &request, None, reply, fds, suspended);
            }
            Request::FilesAs { user, request } => {
                let (suspended, user) = (self.suspended.is_some(), Some(&user[..]));
                self.workers.start(&self.starter, &request, user, reply, fds, suspended);
            }
        }
        Asked::More
    }

    /// Hears of something that was done, of which nobody wants an answer.
    fn told(&mut self, request: &Request) {
        match request {
            Request::Suspend => self.stop_clocks(),
            Request::Resume => self.start_clocks(),
            _ => {}
        }
    }

    fn exec(&mut self, exec: &Exec, channel: OwnedFd, fds: Vec<OwnedFd>) {
        let refuse = |stage, errno| {
            let _ = protocol::send(&channel, &ExecEvent::Refused { stage, errno }, &[]);
        };
        if self.suspended.is_some() {
            return refuse(Stage::Suspended, 0);
        }
        let started = Instant::now();
        let prepared = prepare_streams(exec, fds)
            .map_err(|error| (Stage::Fork, error.raw_os_error().unwrap_or_default()));
        let begun = prepared.and_then(|prepared| Ok((self.begin(exec, &prepared.ends)?, prepared)));
        let (Begun { starting, leaf, mark, first_number, follower }, prepared) = match begun {
            Ok(begun) => begun,
            Err((stage, errno)) => return refuse(stage, errno),
        };
        let pid = starting.pid();
        let cpu_limit = exec.cpu_ms.map(Duration::from_millis);
        let running = Running {
            pid,
            channel: Some(channel),
            starting: Some(starting),
            announced: exec.announced,
            refused: None,
            terminal: prepared.terminal,
            spare: prepared.spare,
            leaf,
            mark,
            started,
            deadline: exec.wall_ms.map(|ms| started + Duration::from_millis(ms)),
            cpu_limit,
            next_cpu_look: cpu_limit.map(|limit| started + limit / self.cpus),
            orphans_cpu: Duration::ZERO,
            stopped_by: None,
            memory_kills: 0,
            stood_still: Duration::ZERO,
            given_up: None,
            only: exec.only && self.plan.lifetime == Lifetime::Attached,
            first_number,
            follower,
            refused_here: Denials::default(),
        };
        if self.plan.bounds.memory.is_some() {
            self.next_memory_look = Some(started + MEMORY_INTERVAL);
        }
        self.logs.extend(prepared.logged.map(|logged| (mark, logged)));
        self.running.insert(pid, running);
    }

    /// Has a process become a command: the one that waits for it, or a new one.
    fn begin(&mut self, exec: &Exec, ends: &Ends) -> Result<Begun, Refusal> {
        let mut planned = self.starter.plan(exec, ends)?;
        self.prepare_at = None;
        if !exec.explain
            && let Some(spare) = self.spare.take()
        {
            let (pid, mark) = (spare.pid(), spare.mark);
            let first_number = self.meter.last_number().map_or(0, |last| last + 1);
            match spare.become_command(planned) {
                (Some(starting), leaf) => {
                    return Ok(Begun {
                        starting,
                        leaf: Some(leaf),
                        mark,
                        first_number,
                        follower: None,
                    });
                }
                // Something killed it, or is about to have.
                (None, leaf) => {
                    let _ = process::signal_raw(pid.as_raw_nonzero().get(), Signal::KILL.as_raw());
                    self.lingering.push(leaf);
                    planned = self.starter.plan(exec, ends)?;
                }
            }
        }
        let leaf = self.work.as_mut().map(Work::new_leaf).transpose();
        let leaf = leaf.map_err(|error| (Stage::Fork, error.raw_os_error().unwrap_or_default()))?;
        let mark = leaf.as_ref().and_then(Leaf::mark).unwrap_or_else(|| self.new_mark());
        let group = self.work.as_ref().zip(leaf.as_ref());
        let begun = match exec.explain {
            true => {
                let (plan, census) = (self.plan, &self.census);
                Follower::start(&self.starter, plan, census, planned, group, mark)
                    .map(|(starting, follower)| (starting, Some(follower)))
            }
            false => self.starter.start(planned, group, mark).map(|starting| (starting, None)),
        };
        match begun {
            Ok((starting, follower)) => {
                let first_number = number(starting.pid());
                Ok(Begun { starting, leaf, mark, first_number, follower })
            }
            Err(refusal) => {
                // The group of a command that was never started must not stay.
                if let (Some(work), Some(leaf)) = (&self.work, &leaf) {
                    work.remove(leaf);
                }
                Err(refusal)
            }
        }
    }

    fn new_mark(&mut self) -> u64 {
        self.next_mark += 1;
        self.next_mark - 1
    }

    /// Makes the process of the next command, while there is nothing else to do.
    ///
    /// Only then: it counts as one of the processes that the sandbox may have, as the command will.
    fn prepare(&mut self) {
        self.prepare_at = None;
        if !self.running.is_empty() || self.spare.is_some() || self.suspended.is_some() {
            return;
        }
        let mark = self.new_mark();
        if let Some(work) = &mut self.work {
            self.spare = self.starter.prepare(work, mark);
        }
    }

    /// Has the process of the next command made a moment after the last one ended, unless the sandbox
    /// will not see another.
    fn prepare_soon(&mut self) {
        // One that is the commands' equal could be stopped by them, and the next command with it.
        let is_apart = |work: &Work| work.owner != WORKLOAD_ID && work.takes_births();
        let is_apart = self.work.as_ref().is_some_and(is_apart);
        let wanted = is_apart && self.plan.lifetime == Lifetime::Detached;
        self.prepare_at = wanted.then(|| Instant::now() + PREPARE_AFTER);
    }

    /// Has somebody else hear of a command with a log.
    fn follow(&mut self, name: &str, channel: OwnedFd, notice: Option<OwnedFd>) {
        let found = self.logs.iter_mut().find(|(_, logged)| logged.name == name);
        let running = found.and_then(|(mark, logged)| {
            let (pid, running) = self.running.iter_mut().find(|(_, r)| r.mark == *mark)?;
            Some((*pid, running, logged))
        });
        let (Some((pid, running, logged)), Some(notice)) = (running, notice) else {
            let (stage, errno) = (Stage::Program, Errno::SRCH.raw_os_error());
            let _ = protocol::send(&channel, &ExecEvent::Refused { stage, errno }, &[]);
            return;
        };
        logged.tell_to(notice);
        // One that is only being started says so itself.
        if running.starting.is_none() && running.refused.is_none() {
            let event = ExecEvent::Started { pid: pid.as_raw_nonzero().get() };
            let _ = protocol::send(&channel, &event, &[]);
            let _ = protocol::send(&channel, &logged.input(), &[]);
        }
        running.channel = Some(channel);
    }

    /// A command wrote more than its log may hold.
    fn full(&mut self, mark: u64) {
        let pid = self.running.iter().find(|(_, running)| running.mark == mark);
        if let Some(pid) = pid.map(|(pid, _)| *pid) {
            self.stop(pid, StoppedBy::Output);
        }
    }

    /// Asks for input where there is room again, and forgets logs of which nothing more can come.
    fn settle_logs(&mut self) {
        self.logs.retain(|_, logged| !logged.is_over());
        for (mark, logged) in &mut self.logs {
            if let Some(event) = logged.wants_input() {
                let running = self.running.values().find(|running| running.mark == *mark);
                if let Some(channel) = running.and_then(|running| running.channel.as_ref()) {
                    let _ = protocol::send(channel, &event, &[]);
                }
            }
        }
    }

    /// The program of a command was executed, or could not be.
    fn started(&mut self, pid: Pid) {
        let Some(running) = self.running.get_mut(&pid) else { return };
        match running.starting.as_mut().and_then(Started::outcome) {
            None => return,
            // It is about to end, and still uses what it was started with.
            Some(Err(refusal)) => {
                running.refused = Some(refusal);
                return;
            }
            Some(Ok(())) => running.starting = None,
        }
        if running.refused.is_none() && running.announced {
            let event = ExecEvent::Started { pid: pid.as_raw_nonzero().get() };
            let terminal: Vec<_> = running.terminal.iter().map(AsFd::as_fd).collect();
            if let Some(channel) = &running.channel {
                let _ = protocol::send(channel, &event, &terminal);
            }
        }
    }

    /// Whoever asked for a command wants something of it, or is gone.
    fn hear(&mut self, pid: Pid) -> Option<ExecControl> {
        let running = self.running.get_mut(&pid)?;
        match protocol::receive_trusted::<ExecControl>(running.channel.as_ref()?) {
            Ok(Some((control, _))) => return Some(control),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            // Nobody listens; a sandbox that outlives its maker goes on all the same.
            Ok(None) | Err(_) => {
                running.channel = None;
                // Whoever read its output went with it; a command must not die of that.
                self.unread.append(&mut running.spare);
                if self.plan.lifetime == Lifetime::Attached {
                    self.stop(pid, StoppedBy::Client);
                }
            }
        }
        None
    }

    fn controlled(&mut self, pid: Pid, control: ExecControl) {
        let Some(running) = self.running.get_mut(&pid) else { return };
        let Some(channel) = &running.channel else { return };
        let logged = self.logs.get_mut(&running.mark);
        match control {
            ExecControl::Signal(signal) => {
                let raw = pid.as_raw_nonzero().get();
                // It leads its session, so its group is its own; it may not have got that far yet.
                let sent = process::signal_raw(-raw, signal);
                if sent.is_err() {
                    let _ = process::signal_raw(raw, signal);
                }
            }
            ExecControl::Resize { rows, columns } => match (&running.terminal, logged) {
                (Some(terminal), _) => drop(terminal::resize(terminal, rows, columns)),
                (None, Some(logged)) => logged.resize(rows, columns),
                (None, None) => {}
            },
            ExecControl::Kill => self.stop(pid, StoppedBy::Client),
            ExecControl::KillRest => self.kill_rest(pid),
            ExecControl::Input { offset, bytes, end } => {
                let closed = ExecEvent::Input { taken: 0, open: false, full: false };
                let event = logged.map_or(closed, |logged| logged.take_input(offset, &bytes, end));
                let _ = protocol::send(channel, &event, &[]);
            }
            ExecControl::Measure => {
                let event = ExecEvent::Used(self.used(&self.running[&pid]));
                if let Some(channel) = &self.running[&pid].channel {
                    let _ = protocol::send(channel, &event, &[]);
                }
            }
        }
    }

    /// Counts the processes and threads of a command. Numbers begin anew when they run out; then there
    /// is no telling.
    fn started_since(&self, running: &Running) -> u64 {
        if self.starter.ruled.is_some() {
            // Others of the host get numbers from the same row.
            return 0;
        }
        let last = self.meter.last_number().unwrap_or_default();
        // The number of one that waited for the command is from before.
        let itself = u64::from(number(running.pid) < running.first_number);
        (last + 1).saturating_sub(running.first_number) + itself
    }

    /// Says what a command has used, and what became of it.
    fn used(&self, running: &Running) -> Used {
        let (read_bytes, written_bytes) =
            self.census.transferred(running.pid.as_raw_nonzero().get());
        let now = self.suspended.map_or(Duration::ZERO, |since| since.elapsed());
        Used {
            cpu_us: micros(self.cpu_of(running)),
            read_bytes,
            written_bytes,
            memory_kills: running.memory_kills,
            scratch_full: scratch_is_full(self.written.as_ref()),
            suspended: self.suspended.is_some(),
            stood_still_us: micros(running.stood_still + now),
        }
    }

    /// Time on a CPU of a command and all it started.
    fn cpu_of(&self, running: &Running) -> Duration {
        running.leaf.as_ref().and_then(Leaf::cpu).unwrap_or_else(|| {
            let own = self.census.processes().into_iter().filter(|seen| seen.mark == running.mark);
            own.map(|seen| seen.cpu).sum::<Duration>() + running.orphans_cpu
        })
    }

    /// Ends what a command started, but not itself.
    fn kill_rest(&self, pid: Pid) {
        let Some(running) = self.running.get(&pid) else { return };
        let spared = pid.as_raw_nonzero().get();
        match (&running.leaf, &self.work) {
            (Some(leaf), Some(work)) => {
                let _ = leaf.kill_but(work, spared, self.suspended.is_some());
            }
            _ => {
                let suspended = self.suspended.is_some();
                let _ = self.census.kill_marked(running.mark, suspended, Some(spared));
            }
        }
    }

    /// Ends a command and everything it started.
    fn stop(&mut self, pid: Pid, by: StoppedBy) {
        let suspended = self.suspended.is_some();
        let Some(running) = self.running.get_mut(&pid) else { return };
        running.stopped_by.get_or_insert(by);
        running.given_up.get_or_insert_with(|| Instant::now() + DYING);
        running.deadline = None;
        running.next_cpu_look = None;
        let killed = match (&running.leaf, &self.work) {
            (Some(leaf), Some(work)) => leaf.kill(work).is_ok(),
            _ => false,
        };
        if !killed {
            let _ = self.census.kill_marked(running.mark, suspended, None);
        }
    }

    /// Reaps every ended child: commands, and orphans of whatever they started.
    fn reap(&mut self) {
        while let Ok(Some(pid)) = process::peek_ended() {
            let command = self.running.contains_key(&pid);
            let before = self.meter.read();
            // Asked before it is reaped: afterwards nobody knows whose orphan it was.
            let mark = if command || self.work.is_some() {
                None
            } else {
                self.census.mark_of(pid.as_raw_nonzero().get())
            };
            let Ok((end, usage)) = process::reap(pid) else { return };
            self.workers.forget(pid);
            if let Some(Spare { leaf, .. }) = self.spare.take_if(|spare| spare.pid() == pid) {
                // Whoever killed it may do so again: the next is made after the next command.
                self.lingering.push(leaf);
            }
            if command {
                self.started(pid);
                let after = self.meter.read();
                let transferred =
                    (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
                if let Some(running) = self.running.remove(&pid) {
                    let until = Instant::now() + DYING;
                    self.ending.push(Ending { running, end, usage, transferred, until });
                }
            } else if let Some(mark) = mark {
                let owner = self.running.values_mut().find(|running| running.mark == mark);
                if let Some(owner) = owner {
                    owner.orphans_cpu += usage.cpu;
                }
            }
        }
        if let Some(work) = &self.work {
            self.lingering.retain(|leaf| !work.remove(leaf));
        }
        self.settle();
    }

    /// Says of each command that it ended, once all is gone that was to be ended with it.
    fn settle(&mut self) {
        let now = Instant::now();
        let ending = std::mem::take(&mut self.ending);
        let (over, dying): (Vec<_>, Vec<_>) = ending.into_iter().partition(|ending| {
            let was_ended = ending.running.stopped_by.is_some();
            !was_ended || ending.until <= now || self.is_gone(&ending.running)
        });
        self.ending = dying;
        for Ending { running, end, usage, transferred, .. } in over {
            self.ended(running, end, usage, transferred);
        }
    }

    /// Reports whether nothing that a command started is left.
    fn is_gone(&self, running: &Running) -> bool {
        match &running.leaf {
            Some(leaf) => leaf.is_empty(),
            None => !self.census.processes().iter().any(|seen| seen.mark == running.mark),
        }
    }

    /// Says that a command failed for want of processes, if it seems so. Only where no group of the host
    /// counts what was refused.
    fn starved(&self, end: End) -> Option<StoppedBy> {
        let full = self.work.as_ref().is_some_and(Work::is_full);
        (full && end != End::Exited(0)).then_some(StoppedBy::Processes)
    }

    /// Says how a command ended and clears up after it.
    fn ended(
        &mut self,
        running: Running,
        end: End,
        usage: process::Usage,
        (read_bytes, written_bytes): (u64, u64),
    ) {
        let event = match running.refused {
            Some((stage, errno)) => {
                self.logs.remove(&running.mark);
                ExecEvent::Refused { stage, errno }
            }
            None => {
                let leaf_cpu = running.leaf.as_ref().and_then(Leaf::cpu);
                let cpu = leaf_cpu.unwrap_or(usage.cpu + running.orphans_cpu);
                let status = match end {
                    End::Exited(code) => Status::Exited(code),
                    End::Signalled(signal) => Status::Signalled(signal),
                };
                let mut ended = Ended {
                    status,
                    stopped_by: running.stopped_by.or_else(|| self.starved(end)),
                    scratch_full: status != Status::Exited(0)
                        && scratch_is_full(self.written.as_ref()),
                    cpu_us: micros(cpu),
                    wall_us: micros(running.started.elapsed()),
                    peak_bytes: usage.peak_resident,
                    read_bytes,
                    written_bytes,
                    tasks_started: self.started_since(&running),
                };
                let denials = running.denials(status);
                if let Some(logged) = self.logs.get_mut(&running.mark) {
                    denials.iter().for_each(|denials| logged.note(denials));
                    logged.end(&mut ended);
                } else if let (Some(denials), Some(channel)) = (denials, &running.channel) {
                    tell(channel, denials);
                }
                ExecEvent::Ended(ended)
            }
        };
        if let Some(channel) = &running.channel {
            let _ = protocol::send(channel, &event, &[]);
            // Who hears of it is woken up on this CPU, as a rule, though another sleeps, and need not wait
            // for what comes now.
            rustix::thread::sched_yield();
        }
        if running.only {
            // What it left behind ends with us; so it would a moment later, by the one who hears this.
            process::exit_now(0);
        }
        self.settle_logs();
        // What it left running may still write; but first the one who listens reads to the end.
        match running.channel {
            Some(channel) if !running.spare.is_empty() => {
                self.reading.push((channel, running.spare));
            }
            _ => self.unread.extend(running.spare),
        }
        if let (Some(work), Some(leaf)) = (&self.work, running.leaf)
            && !work.remove(&leaf)
        {
            self.lingering.push(leaf);
        }
        self.work.iter_mut().for_each(Work::prepare);
        if self.running.is_empty() {
            self.next_memory_look = None;
            self.prepare_soon();
        }
    }

    fn suspend(&mut self) -> std::io::Result<()> {
        if self.suspended.is_some() {
            return Ok(());
        }
        if self.work.is_none() {
            process::signal_all(Signal::STOP)?;
        } else if let Err(error) = self.freeze(true) {
            let _ = self.freeze(false);
            return Err(error);
        }
        self.stop_clocks();
        Ok(())
    }

    /// Freezes or thaws the group of every command, those that left something behind included.
    fn freeze(&self, frozen: bool) -> std::io::Result<()> {
        let Some(work) = &self.work else { return Ok(()) };
        let running = self.running.values().filter_map(|running| running.leaf.as_ref());
        work.freeze(running.chain(&self.lingering), frozen)
    }

    fn resume(&mut self) -> std::io::Result<()> {
        if self.suspended.is_none() {
            return Ok(());
        }
        match &self.work {
            Some(_) => self.freeze(false)?,
            None => process::signal_all(Signal::CONT)?,
        }
        self.start_clocks();
        Ok(())
    }

    fn stop_clocks(&mut self) {
        self.suspended.get_or_insert_with(Instant::now);
    }

    /// Time that stood still for a command does not count against it.
    fn start_clocks(&mut self) {
        let Some(since) = self.suspended.take() else { return };
        for running in self.running.values_mut() {
            running.stood_still += since.elapsed();
            for at in [&mut running.deadline, &mut running.next_cpu_look] {
                *at = at.map(|at| at + since.elapsed());
            }
        }
    }

    /// Returns when something has to be looked at, though nothing happens.
    fn next_deadline(&self) -> Option<Instant> {
        if self.suspended.is_some() {
            return None;
        }
        let each = self
            .running
            .values()
            .flat_map(|running| [running.deadline, running.next_cpu_look, running.given_up]);
        let dying = self.ending.iter().map(|ending| Some(ending.until));
        each.chain([self.next_memory_look, self.prepare_at]).chain(dying).flatten().min()
    }

    /// Ends what has used up its time or memory.
    fn watch(&mut self) {
        let now = Instant::now();
        if self.suspended.is_some() || self.next_deadline().is_none_or(|at| at > now) {
            return;
        }
        let due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        let pids: Vec<Pid> = self.running.keys().copied().collect();
        for pid in pids {
            if due(self.running[&pid].given_up) {
                self.give_up(pid);
            } else if due(self.running[&pid].deadline) {
                self.stop(pid, StoppedBy::WallTime);
            } else if due(self.running[&pid].next_cpu_look) {
                self.look_at_cpu(pid, now);
            }
        }
        if due(self.next_memory_look) {
            self.look_at_memory(now);
        }
        if due(self.prepare_at) {
            self.prepare();
        }
        self.settle();
    }

    /// Says of a command that it ended, although its first process waits for something that holds off
    /// even the last of signals, as a file system in user space can. It is reaped like an orphan when it
    /// dies at last.
    fn give_up(&mut self, pid: Pid) {
        let Some(running) = self.running.remove(&pid) else { return };
        // It may be what holds the process up.
        running.follower.iter().for_each(Follower::end);
        let usage = process::Usage { cpu: Duration::ZERO, peak_resident: 0 };
        self.ended(running, End::Signalled(Signal::KILL.as_raw()), usage, (0, 0));
    }

    /// Ends a command over its CPU time, or says when it can be over at the earliest.
    fn look_at_cpu(&mut self, pid: Pid, now: Instant) {
        let cpus = self.cpus;
        let Some(running) = self.running.get(&pid) else { return };
        let Some(limit) = running.cpu_limit else { return };
        let used = self.cpu_of(running);
        if used >= limit {
            self.stop(pid, StoppedBy::CpuTime);
        } else if let Some(running) = self.running.get_mut(&pid) {
            running.next_cpu_look = Some(now + ((limit - used) / cpus).max(CPU_INTERVAL));
        }
    }

    /// Ends a command for the memory that it holds. Of a shell that is told what to do only what it
    /// started goes, as long as there is something: it need not be lost with a program.
    fn relieve(&mut self, pid: Pid, seen: &[Seen]) {
        let Some(running) = self.running.get_mut(&pid) else { return };
        let is_driven = self.logs.get(&running.mark).is_some_and(Logged::is_driven);
        let own = pid.as_raw_nonzero().get();
        let started = |seen: &&Seen| seen.mark == running.mark && seen.pid != own;
        if is_driven && seen.iter().any(|seen| started(&seen) && seen.resident > 0) {
            running.memory_kills += 1;
            self.kill_rest(pid);
        } else {
            self.stop(pid, StoppedBy::Memory);
        }
    }

    /// Ends the command that holds most memory when all together hold too much.
    fn look_at_memory(&mut self, now: Instant) {
        let Some(limit) = self.plan.bounds.memory else { return };
        self.next_memory_look = Some(now + MEMORY_INTERVAL);
        let seen = self.census.processes();
        if seen.iter().map(|seen| seen.resident).sum::<u64>() <= limit {
            return;
        }
        let held = |running: &Running| {
            let own = seen.iter().filter(|seen| seen.mark == running.mark);
            own.map(|seen| seen.resident).sum::<u64>()
        };
        let largest = self.running.iter().max_by_key(|(_, running)| held(running));
        match largest.map(|(pid, running)| (*pid, held(running))) {
            Some((pid, held)) if held > 0 => self.relieve(pid, &seen),
            // What holds it was left behind by commands that ended.
            _ => {
                let _ = process::signal_all(Signal::KILL);
            }
        }
    }
}

/// The streams of a command that is to be started.
struct Prepared {
    ends: Ends,
    terminal: Option<OwnedFd>,
    spare: Vec<OwnedFd>,
    logged: Option<Logged>,
}

/// Makes the streams of a command, with the descriptors that came with the request.
fn prepare_streams(exec: &Exec, mut fds: Vec<OwnedFd>) -> std::io::Result<Prepared> {
    let mut prepared =
        Prepared { ends: Ends::default(), terminal: None, spare: Vec::new(), logged: None };
    match &exec.streams {
        Streams::Given => {
            prepared.spare = fds.split_off(fds.len().min(3));
            prepared.ends.streams = fds;
        }
        Streams::Terminal { rows, columns } => {
            let Terminal { outer, inner } = Terminal::given_or_open(&mut fds, *rows, *columns)?;
            (prepared.terminal, prepared.ends.terminal) = (Some(outer), Some(inner));
        }
        Streams::Logged { input, terminal, limit, overflow } => {
            let (Some(notice), Some(log)) = (fds.pop(), fds.pop()) else {
                return Err(Errno::BADF.into());
            };
            let terminal = match *terminal {
                Some((rows, columns)) => Some(Terminal::given_or_open(&mut fds, rows, columns)?),
                None => None,
            };
            let name = exec.name.clone();
            let (logged, mut ends) =
                Logged::new(name, log, notice, input, terminal, *limit, *overflow)?;
            if *input == Input::Control {
                ends.streams.extend(fds);
            }
            (prepared.logged, prepared.ends) = (Some(logged), ends);
        }
    }
    Ok(prepared)
}

/// Says what walls refused to a command.
fn tell(channel: &OwnedFd, denials: Denials) {
    for denied in denials.list {
        let _ = protocol::send(channel, &ExecEvent::Denied(denied), &[]);
    }
    if denials.omitted > 0 {
        let _ = protocol::send(channel, &ExecEvent::DeniedMore(denials.omitted), &[]);
    }
}

/// Empties a pipe into nothing; `false` when nobody can write to it any more.
fn discard(pipe: &OwnedFd) -> bool {
    !matches!(rustix::io::read(pipe, &mut [0; 16 * 1024]), Ok(0))
}

fn answer(reply: &OwnedFd, result: std::io::Result<()>) {
    let errno = result.err().map_or(0, |error| error.raw_os_error().unwrap_or(-1));
    let _ = protocol::send(reply, &Done(errno), &[]);
}

fn number(pid: Pid) -> u64 {
    u64::from(pid.as_raw_nonzero().get().unsigned_abs())
}

fn micros(time: Duration) -> u64 {
    time.as_micros().try_into().unwrap_or(u64::MAX)
}

/// Reports whether nothing more can be written, in bytes or in files; `written` is where, if that is not to be looked up.
pub(crate) fn scratch_is_full(written: Option<&OwnedFd>) -> bool {
    let room = match written {
        Some(directory) => rustix::fs::fstatvfs(directory),
        None => rustix::fs::statvfs(c"/tmp"),
    };
    room.is_ok_and(|fs| {
        (fs.f_blocks > 0 && fs.f_bavail == 0) || (fs.f_files > 0 && fs.f_favail == 0)
    })
}
