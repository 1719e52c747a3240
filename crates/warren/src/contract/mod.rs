//! The public types and traits, one file a noun, no behaviour beyond them.
//!
//! A listed struct of CONTRACT.md has exactly the listed public fields, so that struct literals of
//! users keep compiling; what is new lives in new types beside them. How a sandbox is built, kept
//! and shared is left to the backends and the manager.

mod backend;
mod base;
mod capabilities;
mod command;
mod denial;
mod destination;
mod error;
mod exec;
mod execs;
mod files;
mod identity;
mod isolation;
mod limits;
mod manager;
mod pool;
mod port;
mod reach;
mod receipt;
mod sandbox;
mod selection;
mod session;
mod snapshot;
mod spec;
mod witness;

pub use backend::{
    BackendCapabilities, BackendHealth, CreateOptions, Finding, Inspection, IsolationBackend,
};
pub use base::{Base, HostTools, LayerId, MAX_LAYERS};
pub use capabilities::{Enforcement, Layer, SandboxCapabilities};
pub use command::Command;
pub use denial::{Denial, Explain};
pub use destination::{Destination, DestinationHost, NoDestination};
pub(crate) use destination::{has, width};
pub use error::{ProgramFault, Result, SandboxError};
pub use exec::{ExecCause, ExecContext, ExecOutput, ExecReport, ResourceUsage, StreamOutput};
pub use execs::{
    ExecEnd, ExecHandle, ExecId, ExecInfo, ExecInput, ExecMeasure, ExecOptions, ExecUser,
    FoundExec, LogOverflow, LogPiece, LogRead, LogStream, LogWait, MAX_EXEC_NOTE, TerminalSize,
    TimeLimits,
};
pub use files::{
    FileChange, FileChangeKind, FileContents, FileDetails, FileEntry, FileFault, FileKind,
    FileListing, FileSource, FileStream, FileWatch, ListItem, ListOptions, RenameOptions,
    SandboxFiles, TreeSummary, WriteMode, WriteOptions,
};
pub use identity::SandboxId;
pub use isolation::{
    AcquireOptions, Guarantee, IsolationLevel, IsolationRequirements, UnknownIsolation,
};
pub use limits::{Bound, EnforcedLimit, Limit, ResourceLimits, UnknownLimit};
pub use manager::{SandboxManager, SandboxManagerConfig, SandboxManagerStats};
pub use pool::PoolConfig;
pub use port::PortStream;
pub use reach::Reach;
pub use receipt::{
    Envelope, EnvelopeSignature, Extent, Receipt, ReceiptLayer, ReceiptTry, SignedReceipt, Verdict,
};
pub use sandbox::Sandbox;
pub use selection::{RequiredCapabilities, SandboxSelectionOptions};
pub use session::{AttachRequest, AttachResult, SandboxSession, SessionState, SessionTimeouts};
pub use snapshot::{
    Capture, DiffEntry, DiffKind, DiffOptions, DiffSide, ForkOptions, Importer, Snapshot,
    SnapshotId, SnapshotKind, SnapshotOptions,
};
pub use spec::{BindMount, OperatorOnly, SandboxSpec};
pub use witness::{BarredDestination, BarredDestinations, BarredWhy, Outcome, Run, Witness};
