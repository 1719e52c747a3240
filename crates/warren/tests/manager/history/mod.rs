//! Many clients at once, against a model: whatever they saw, there is an order of steps, each at one
//! moment within its call, in which a simple machine would have answered them the same.
//!
//! | file | its job |
//! | --- | --- |
//! | `program.rs` | what clients do, drawn and shrunk by proptest |
//! | `drive.rs` | has them do it all at once, and writes down what they see |
//! | `spec.rs` | what the manager may do, step by step |
//! | `search.rs` | looks for an order of steps that explains what was seen |
//! | `broken.rs` | managers that break a rule, to see each of them found out |

mod broken;
mod drive;
mod program;
mod search;
mod spec;

use std::cell::Cell;
use std::sync::Arc;

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use warren::{DefaultSandboxManager, SandboxManager};

use self::broken::{Broken, How};
use self::drive::{Wrap, drive};
use self::program::{Program, programs};
use self::search::explain;

/// How many histories are tried, unless `PROPTEST_CASES` says more. With some 24 calls each they are
/// more than 100,000 calls.
const HISTORIES: u32 = 4_500;

fn as_it_is(manager: DefaultSandboxManager) -> Arc<dyn SandboxManager> {
    Arc::new(manager)
}

/// Drives one program and says what cannot be explained of what was seen.
fn check(program: &Program, wrap: Wrap<'_>) -> Result<[usize; 3], String> {
    let (rules, history) = drive(program, wrap);
    match explain(rules, &history) {
        Ok(tried) => Ok([history.ops.len(), history.overlapping(), tried]),
        Err(why) => {
            let told = history.told(why.furthest);
            Err(format!("no order explains the last of these ({} tried):\n{told}", why.tried))
        }
    }
}

fn runner(cases: u32) -> TestRunner {
    let shrinking =
        Config { max_shrink_iters: 2_000, failure_persistence: None, ..Config::default() };
    TestRunner::new(Config { cases, ..shrinking })
}

#[test]
fn what_clients_see_at_once_is_what_some_order_of_steps_would_show() {
    let histories = Config::default().cases.max(HISTORIES);
    let sums = Cell::new([0; 3]);
    let outcome = runner(histories).run(&programs(), |program| {
        let counts = check(&program, &as_it_is).map_err(TestCaseError::fail)?;
        sums.set(std::array::from_fn(|at| sums.get()[at] + counts[at]));
        Ok(())
    });
    if let Err(TestError::Fail(why, program)) = outcome {
        panic!("{program:?}\n{why}");
    }
    let [calls, overlapping, tried] = sums.get();
    eprintln!(
        "{histories} histories, {calls} calls, {overlapping} overlapped, {tried} steps tried"
    );
    assert!(calls >= 100_000, "{calls} calls");
    // Reads and refusals take no time, so that many a call cannot overlap.
    assert!(overlapping * 3 > calls, "control: {overlapping} of {calls} calls overlapped");
}

/// The control: a manager that breaks a rule gives a history that nothing explains.
#[test]
fn a_manager_that_breaks_a_rule_is_found_out() {
    for how in How::ALL {
        let wrap = |manager| -> Arc<dyn SandboxManager> { Arc::new(Broken::new(manager, how)) };
        let mut runner = runner(1);
        let found = (1..=10_000).find(|_| {
            let program = programs().new_tree(&mut runner).unwrap().current();
            check(&program, &wrap).is_err()
        });
        eprintln!("{how:?}: found out by history {found:?}");
        assert!(found.is_some(), "{how:?} was not found out");
    }
}

#[test]
fn a_manager_that_gives_one_more_than_its_limit_is_found_out() {
    let mut runner = runner(1);
    let found = (1..=10_000).find(|_| {
        let program = programs().new_tree(&mut runner).unwrap().current();
        let (rules, history) = drive(&program, &as_it_is);
        explain(spec::Rules { max: rules.max - 1, ..rules }, &history).is_err()
    });
    assert!(found.is_some(), "it was not found out");
}
