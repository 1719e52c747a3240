//! What clients do, drawn and shrunk by proptest.

use std::fmt;

use proptest::collection::vec;
use proptest::prelude::*;

use super::spec::{Fault, Wanted};

/// What some clients do at once.
#[derive(Clone)]
pub(super) struct Program {
    pub(super) clients: Vec<Vec<Deed>>,
    /// What the backend's pauses are drawn from.
    pub(super) pace: u64,
    pub(super) pooled: bool,
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "pace {}, pooled: {}", self.pace, self.pooled)?;
        for (no, deeds) in self.clients.iter().enumerate() {
            writeln!(f, "client {no}:")?;
            for Deed { pause, what } in deeds {
                writeln!(f, "    {pause:?}: {what:?}")?;
            }
        }
        Ok(())
    }
}

/// One call, after a pause.
#[derive(Debug, Clone)]
pub(super) struct Deed {
    pub(super) pause: Pause,
    pub(super) what: What,
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Pause {
    Turns(u8),
    Millis(u8),
    Seconds(u8),
}

/// A call whose object is chosen when it is made, from what there is then.
#[derive(Debug, Clone)]
pub(super) enum What {
    Acquire {
        spec: u8,
        pool: bool,
        fresh: bool,
        labelled: bool,
        network: Option<bool>,
    },
    Prefer {
        pick: u8,
        fresh: bool,
    },
    /// Under an id that the client chooses.
    AttachChosen {
        id: u8,
        create: bool,
    },
    Attach {
        pick: u8,
        create: bool,
        foreign: bool,
    },
    Move {
        pick: u8,
        wanted: Wanted,
        foreign: bool,
    },
    Exec {
        pick: u8,
    },
    SetDefault {
        pick: Option<u8>,
    },
    GetDefault,
    Sweep,
    List,
    Stats,
    GetSession {
        pick: u8,
    },
    BySandbox {
        pick: u8,
    },
    ByClient,
    Arm(Fault),
    Wait {
        seconds: u8,
    },
}

fn pause() -> impl Strategy<Value = Pause> {
    prop_oneof![
        20 => (0..3_u8).prop_map(Pause::Turns),
        5 => (0..4_u8).prop_map(Pause::Millis),
        1 => (1..25_u8).prop_map(Pause::Seconds),
    ]
}

fn wanted() -> impl Strategy<Value = Wanted> {
    prop_oneof![
        3 => Just(Wanted::Detach),
        3 => Just(Wanted::Keep),
        4 => Just(Wanted::Suspend),
        3 => Just(Wanted::Resume),
        5 => Just(Wanted::End),
    ]
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        Just(Fault::Create),
        Just(Fault::Suspend),
        Just(Fault::Resume),
        Just(Fault::Destroy),
        Just(Fault::Exec),
    ]
}

fn rarely() -> impl Strategy<Value = bool> {
    prop::bool::weighted(0.15)
}

fn what() -> impl Strategy<Value = What> {
    let pick = any::<u8>;
    let network = prop_oneof![6 => Just(None), 1 => any::<bool>().prop_map(Some)];
    prop_oneof![
        12 => (0..3_u8, any::<bool>(), rarely(), rarely(), network).prop_map(
            |(spec, pool, fresh, labelled, network)| {
                What::Acquire { spec, pool, fresh, labelled, network }
            }
        ),
        3 => (pick(), rarely()).prop_map(|(pick, fresh)| What::Prefer { pick, fresh }),
        5 => (0..2_u8, prop::bool::weighted(0.8))
            .prop_map(|(id, create)| What::AttachChosen { id, create }),
        5 => (pick(), any::<bool>(), rarely())
            .prop_map(|(pick, create, foreign)| What::Attach { pick, create, foreign }),
        20 => (pick(), wanted(), prop::bool::weighted(0.05))
            .prop_map(|(pick, wanted, foreign)| What::Move { pick, wanted, foreign }),
        6 => pick().prop_map(|pick| What::Exec { pick }),
        3 => prop::option::weighted(0.8, pick()).prop_map(|pick| What::SetDefault { pick }),
        2 => Just(What::GetDefault),
        4 => Just(What::Sweep),
        2 => Just(What::List),
        3 => Just(What::Stats),
        2 => pick().prop_map(|pick| What::GetSession { pick }),
        1 => pick().prop_map(|pick| What::BySandbox { pick }),
        1 => Just(What::ByClient),
        4 => fault().prop_map(What::Arm),
        2 => (1..50_u8).prop_map(|seconds| What::Wait { seconds }),
    ]
}

pub(super) fn programs() -> impl Strategy<Value = Program> {
    let deed = (pause(), what()).prop_map(|(pause, what)| Deed { pause, what });
    let clients = vec(vec(deed, 4..9), 3..5);
    (clients, any::<u64>(), prop::bool::weighted(0.3)).prop_map(|(clients, pace, pooled)| Program {
        clients,
        pace,
        pooled,
    })
}
