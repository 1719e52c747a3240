//! Signals that Warren gets and hands on.

use std::io;
use std::task::Poll;

use tokio::signal::unix::{self, SignalKind};

/// The signals that are handed on to the command.
#[derive(Debug)]
pub(crate) struct Signals {
    streams: Vec<(i32, unix::Signal)>,
}

/// What to do with a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// Hand it on.
    Signal(i32),
    /// The window has a new size.
    Resized,
}

impl Signals {
    /// Begins to listen. What came before has done what signals do.
    pub(crate) fn listen(tty: bool) -> io::Result<Self> {
        let mut kinds = vec![
            SignalKind::interrupt(),
            SignalKind::terminate(),
            SignalKind::hangup(),
            SignalKind::quit(),
            SignalKind::user_defined1(),
            SignalKind::user_defined2(),
        ];
        if tty {
            kinds.push(SignalKind::window_change());
        }
        let ignored = ignored();
        kinds.retain(|kind| ignored & (1 << (kind.as_raw_value() - 1)) == 0);
        let streams = kinds.into_iter().map(|kind| Ok((kind.as_raw_value(), unix::signal(kind)?)));
        Ok(Self { streams: streams.collect::<io::Result<_>>()? })
    }

    /// Waits for the next one.
    pub(crate) async fn next(&mut self) -> Received {
        std::future::poll_fn(|context| {
            for (number, stream) in &mut self.streams {
                if let Poll::Ready(Some(())) = stream.poll_recv(context) {
                    let resized = *number == SignalKind::window_change().as_raw_value();
                    let received =
                        if resized { Received::Resized } else { Received::Signal(*number) };
                    return Poll::Ready(received);
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// Finds the signals that we were started to ignore, as by nohup(1): they stay so.
fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

/// Tells whether a signal asks to end, so that a second one means it.
pub(crate) fn asks_to_end(signal: i32) -> bool {
    [SignalKind::interrupt(), SignalKind::terminate()]
        .iter()
        .any(|kind| kind.as_raw_value() == signal)
}
