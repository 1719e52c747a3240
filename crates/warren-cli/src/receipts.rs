//! `warren verify` and `warren receipt`: what was tried of a sandbox, and whether to believe it.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use hyper::Method;
use serde_json::Value;
use warren::receipt::{self, ReceiptFault};
use warren::{Receipt, ReceiptLayer, Verdict};
use warren_api::rest::wire::{ReceiptKeyView, ReceiptView};

use crate::args::{ClientArgs, TargetArgs};
use crate::client::Client;
use crate::commands::{find, printed, read, show_object};
use crate::failure::Failure;
use crate::output;

/// The longest file that is read.
const MAX_FILE: u64 = 2 << 20;

/// What to do with receipts.
#[derive(Debug, Subcommand)]
pub(crate) enum ReceiptAction {
    /// Print what was tried of a sandbox the last time, signed, as JSON.
    Show(TargetArgs),
    /// Print the public key that receipts are checked with, as PEM.
    Key(ClientArgs),
    /// Check a receipt and print what it says; needs neither a daemon nor the sandbox.
    ///
    /// The exit code is 1 if the receipt is not what the owner of the key signed.
    Verify(ReceiptVerifyArgs),
}

impl ReceiptAction {
    pub(crate) fn is_json(&self) -> bool {
        match self {
            Self::Show(args) => args.client.json,
            Self::Key(args) => args.json,
            Self::Verify(args) => args.json,
        }
    }
}

/// Which receipt to check.
#[derive(Debug, Args)]
pub(crate) struct ReceiptVerifyArgs {
    /// The public key, as `warren receipt key` prints it.
    #[arg(long, value_name = "FILE")]
    pub(crate) key: PathBuf,
    /// Print the receipt as one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
    /// The receipt, as `warren receipt show` prints it; `-` is stdin.
    pub(crate) file: PathBuf,
}

/// `warren verify`.
pub(crate) fn verify(args: &TargetArgs) -> Result<u8, Failure> {
    let client = Client::new(&args.client)?;
    let id = find(&client, &args.sandbox)?.id;
    let path = format!("/v1/sandboxes/{id}/verify");
    let made: Value = client.send(Method::POST, &path, &serde_json::json!({}), &[])?;
    if args.client.json {
        return show_object(&made);
    }
    let made: ReceiptView = read(made)?;
    print(&made.receipt)
}

/// `warren receipt`.
pub(crate) fn receipt(action: &ReceiptAction) -> Result<u8, Failure> {
    match action {
        ReceiptAction::Show(args) => {
            let client = Client::new(&args.client)?;
            let id = find(&client, &args.sandbox)?.id;
            let receipt: Value = client.get(&format!("/v1/sandboxes/{id}/receipt"))?;
            show_object(&receipt)
        }
        ReceiptAction::Key(args) => {
            let key: ReceiptKeyView = Client::new(args)?.get("/v1/receipt-key")?;
            if args.json {
                return show_object(&key);
            }
            printed(output::print(key.public_key.as_bytes()))
        }
        ReceiptAction::Verify(args) => check(args),
    }
}

fn check(args: &ReceiptVerifyArgs) -> Result<u8, Failure> {
    let (text, key) = (file(&args.file)?, file(&args.key)?);
    match receipt::verify(&text, &key) {
        Ok(receipt) if args.json => show_object(&receipt),
        Ok(receipt) => print(&receipt),
        Err(fault) => Err(not_believed(&fault)),
    }
}

/// One that is not believed is the answer to what was asked, and no error of ours.
fn not_believed(fault: &ReceiptFault) -> Failure {
    let hint = match fault {
        ReceiptFault::NotOne(_) => "`warren receipt show SANDBOX` prints one",
        ReceiptFault::Key => "`warren receipt key` prints one",
        ReceiptFault::Unsigned => "it was made without a daemon, or by one without a key",
        ReceiptFault::OtherKey { .. } => {
            "ask whoever gave you the receipt for the key of that daemon"
        }
        ReceiptFault::Forged | ReceiptFault::Differs => "do not rely on it",
    };
    Failure::fatal("receipt", fault.to_string()).with_hint(hint).with_exit(1)
}

fn file(path: &Path) -> Result<String, Failure> {
    let failed = |error| Failure::system(&format!("cannot read {}", path.display()), &error);
    let mut text = String::new();
    if path == Path::new("-") {
        std::io::stdin().lock().take(MAX_FILE).read_to_string(&mut text).map_err(failed)?;
    } else {
        let file = std::fs::File::open(path).map_err(failed)?;
        file.take(MAX_FILE).read_to_string(&mut text).map_err(failed)?;
    }
    Ok(text)
}

/// Says in one line what a layer came to.
pub(crate) fn in_short(layer: &ReceiptLayer) -> String {
    let tried = layer.tries.iter().filter(|one| match one.verdict {
        Verdict::Held | Verdict::Open => true,
        // Of a layer of which something is promised, what is not is no part of the answer.
        Verdict::NotPromised => layer.verdict == Verdict::NotPromised,
        Verdict::Partly | Verdict::Set | Verdict::NotTried => false,
    });
    match tried.count() {
        0 => layer.verdict.to_string(),
        tried => format!("{}, {tried} tried", layer.verdict),
    }
}

fn print(receipt: &Receipt) -> Result<u8, Failure> {
    let rows = receipt.layers.iter().flat_map(|layer| {
        let row = |what: &str, said: &str, verdict: String, by: &str| {
            let cells = [&layer.layer, what, said, &verdict, by];
            cells.map(str::to_owned).to_vec()
        };
        let none = layer.tries.is_empty().then(|| row("-", "-", layer.verdict.to_string(), "-"));
        let tries = layer.tries.iter();
        let tries =
            tries.map(move |one| row(&one.what, &one.said, one.verdict.to_string(), &one.by));
        none.into_iter().chain(tries.collect::<Vec<_>>()).collect::<Vec<_>>()
    });
    let table = output::table(&["LAYER", "TRIED", "SAID", "VERDICT", "BY"], rows.collect());
    let head = format!(
        "{}: {}, {} on {}, {}\n",
        receipt.sandbox_id,
        receipt.verdict,
        receipt.extent,
        receipt.tried_at.format("%Y-%m-%d %H:%M:%S UTC"),
        receipt.kernel
    );
    printed(output::print(format!("{head}{table}").as_bytes()))
}
