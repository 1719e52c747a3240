//! `warren template`: builds, lists, tags and removes what sandboxes are made from.

use std::fs::File;
use std::io::{self, IsTerminal as _, Write};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use hyper::Method;
use serde_json::Value;
use warren_api::rest::templates::{BuildBody, BuildState, BuildView, TemplateView};
use warren_api::rest::wire::{LimitsBody, Page};

use crate::args::{ClientArgs, NetArgs};
use crate::client::Client;
use crate::commands::{age, chrono_now, printed, read, show_object};
use crate::failure::Failure;
use crate::files::Outlet;
use crate::output::{self, say};
use crate::units::{self, Bytes, Cap};

/// What a recipe is called in a directory of files.
const RECIPES: [&str; 2] = ["Warrenfile", "Dockerfile"];

/// What to do with templates.
#[derive(Debug, Subcommand)]
pub(crate) enum TemplateAction {
    /// Build a template from a recipe: steps as in a Dockerfile.
    ///
    /// Each step runs in a sandbox of its own, and one that was done before is not done again. FROM is
    /// `host`, `template:NAME`, an image of a registry, or for the operator a path on the daemon's
    /// host. COPY copies from DIR. Steps reach what --allow-net names, or nothing. CMD is started in each sandbox, HEALTHCHECK CMD says when it is ready.
    Build(BuildArgs),
    /// Make a template of a root or an image: a directory, an archive, or what `docker save` wrote.
    Import(ImportArgs),
    /// List the templates.
    Ls(TemplateLsArgs),
    /// Show a template with all that is known of it.
    Show(TemplateNameArgs),
    /// Give a template one more tag.
    Tag(TagArgs),
    /// Forget templates; sandboxes made from them live on.
    Rm(TemplateRmArgs),
}

impl TemplateAction {
    pub(crate) fn is_json(&self) -> bool {
        match self {
            Self::Build(args) => args.client.json,
            Self::Import(args) => args.client.json,
            Self::Ls(args) => args.client.json,
            Self::Show(args) => args.client.json,
            Self::Tag(args) => args.client.json,
            Self::Rm(args) => args.client.json,
        }
    }
}

/// How steps run.
#[derive(Debug, Args)]
pub(crate) struct StepArgs {
    /// More tags for the template.
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Profile of the sandboxes that steps run in: `dev` has a root.
    #[arg(long, value_name = "NAME")]
    profile: Option<String>,
    /// Memory of a step [default: 4G].
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    memory: Option<Cap<u64>>,
    /// What all files that a step writes may take up [default: 2G].
    #[arg(long, value_name = "SIZE", value_parser = units::size)]
    disk: Option<Cap<u64>>,
    /// Time by the clock of a step [default: 30m].
    #[arg(long, value_name = "TIME", value_parser = units::time)]
    timeout: Option<Cap<u64>>,
    /// Do every step, known from before or not.
    #[arg(long)]
    no_cache: bool,
}

/// What to build.
#[derive(Debug, Args)]
pub(crate) struct BuildArgs {
    #[command(flatten)]
    client: ClientArgs,
    #[command(flatten)]
    steps: StepArgs,
    #[command(flatten)]
    net: NetArgs,
    /// The recipe [default: Warrenfile or Dockerfile in DIR].
    #[arg(long, short, value_name = "FILE")]
    file: Option<PathBuf>,
    /// What to call it: NAME or NAME:TAG.
    name: String,
    /// Directory that files are copied from.
    #[arg(value_name = "DIR", default_value = ".")]
    dir: PathBuf,
}

/// What to import.
#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    #[command(flatten)]
    client: ClientArgs,
    #[command(flatten)]
    steps: StepArgs,
    /// What to call it: NAME or NAME:TAG.
    name: String,
    /// A directory or an archive.
    #[arg(value_name = "PATH")]
    source: PathBuf,
}

/// How to list.
#[derive(Debug, Args)]
pub(crate) struct TemplateLsArgs {
    #[command(flatten)]
    client: ClientArgs,
}

/// Which template.
#[derive(Debug, Args)]
pub(crate) struct TemplateNameArgs {
    #[command(flatten)]
    client: ClientArgs,
    /// Its name, with a tag or without, or its id.
    name: String,
}

/// Which templates to forget.
#[derive(Debug, Args)]
pub(crate) struct TemplateRmArgs {
    #[command(flatten)]
    client: ClientArgs,
    /// Names, or ids; a name without a tag is all that have it.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<String>,
}

/// Which tag to give.
#[derive(Debug, Args)]
pub(crate) struct TagArgs {
    #[command(flatten)]
    client: ClientArgs,
    /// Its name, with a tag or without, or its id.
    name: String,
    /// The tag.
    tag: String,
}

/// `warren template`.
pub(crate) fn template(action: &TemplateAction) -> Result<u8, Failure> {
    match action {
        TemplateAction::Build(args) => build(args),
        TemplateAction::Import(args) => import(args),
        TemplateAction::Ls(args) => ls(&args.client),
        TemplateAction::Show(args) => {
            let client = Client::new(&args.client)?;
            show(&client.get::<Value>(&place(&args.name)?)?, args.client.json)
        }
        TemplateAction::Tag(args) => {
            let client = Client::new(&args.client)?;
            let path = format!("{}/tags/{}", place(&args.name)?, plain(&args.tag)?);
            let tagged: Value = client.send(Method::PUT, &path, &serde_json::json!({}), &[])?;
            show(&tagged, args.client.json)
        }
        TemplateAction::Rm(args) => {
            let client = Client::new(&args.client)?;
            for name in &args.names {
                client.delete(&place(name)?)?;
            }
            Ok(0)
        }
    }
}

/// Checks what becomes a part of a path.
fn plain(text: &str) -> Result<&str, Failure> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-:".contains(c);
    if !text.is_empty() && text.chars().all(fits) {
        return Ok(text);
    }
    let message = format!("`{}` is no name of a template", text.escape_debug());
    Err(Failure::usage(message, "a name is NAME or NAME:TAG; one with `/` is found by its id"))
}

fn place(name: &str) -> Result<String, Failure> {
    Ok(format!("/v1/templates/{}", plain(name)?))
}

impl StepArgs {
    fn body(&self, name: &str, recipe: String, files: bool) -> BuildBody {
        BuildBody {
            name: name.to_owned(),
            tags: self.tags.clone(),
            recipe,
            files,
            profile: self.profile.clone(),
            limits: LimitsBody {
                max_memory_bytes: self.memory.map(Cap::bound),
                max_write_bytes: self.disk.map(Cap::bound),
                max_wall_time_ms: self.timeout.map(Cap::bound),
                ..LimitsBody::default()
            },
            no_cache: self.no_cache,
            ..BuildBody::default()
        }
    }
}

fn build(args: &BuildArgs) -> Result<u8, Failure> {
    let file = match &args.file {
        Some(file) => file.clone(),
        None => {
            let found = RECIPES.iter().map(|name| args.dir.join(name)).find(|path| path.exists());
            found.ok_or_else(|| {
                let message = format!("there is no recipe in {}", args.dir.display());
                Failure::usage(message, "write a Warrenfile there, or name one: --file FILE")
            })?
        }
    };
    let recipe = std::fs::read_to_string(&file)
        .map_err(|error| Failure::system(&format!("cannot read {}", file.display()), &error))?;
    let copies = |line: &str| {
        let word = line.split_whitespace().next().unwrap_or_default();
        word.eq_ignore_ascii_case("copy")
    };
    let files = recipe.lines().any(copies);
    let body = BuildBody {
        network_enabled: args.net.network,
        allowed_network: args.net.allow_net.clone(),
        ..args.steps.body(&args.name, recipe, files)
    };
    run(&args.client, &body, files.then_some(&args.dir))
}

fn import(args: &ImportArgs) -> Result<u8, Failure> {
    let body = args.steps.body(&args.name, "FROM upload".to_owned(), true);
    run(&args.client, &body, Some(&args.source))
}

/// Has a template built, and shows what is said meanwhile.
fn run(args: &ClientArgs, body: &BuildBody, files: Option<&PathBuf>) -> Result<u8, Failure> {
    let client = Client::new(args)?;
    let mut build: BuildView = client.send(Method::POST, "/v1/templates/builds", body, &[])?;
    let path = format!("/v1/templates/builds/{}", build.id);
    if let Some(source) = files {
        let sent = client.upload::<BuildView>(
            Method::PUT,
            &format!("{path}/files"),
            Some("application/x-tar"),
            |outlet| send(source, outlet),
        );
        if let Err(error) = sent {
            // Nobody will send them any more.
            let _ = client.delete(&path);
            return Err(error);
        }
    }
    let colour = io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let mut offset = 0;
    loop {
        build = client.get(&format!("{path}?offset={offset}&wait=true"))?;
        offset = build.next;
        for entry in &build.log {
            let step = entry.step.as_deref().unwrap_or("-");
            match colour && entry.level == "error" {
                true => say(&format!("[{step}] error: {}", entry.message)),
                false => say(&format!("[{step}] {}", entry.message)),
            }
        }
        if build.log.is_empty()
            && !matches!(build.state, BuildState::Waiting | BuildState::Building)
        {
            break;
        }
    }
    if let Some(failure) = build.failure {
        let message = format!("step {} failed: {}", failure.step, failure.message);
        return Err(Failure::fatal("build_failed", message)
            .with_hint("steps that were done are known when it is built again"));
    }
    if args.json {
        return show_object(&client.get::<Value>(&format!("/v1/templates/{}", build.id))?);
    }
    printed(output::print(format!("{}\n", build.id).as_bytes()))
}

/// Sends a file as it is, or a directory as an archive.
fn send(source: &Path, outlet: &Outlet) -> Result<(), Failure> {
    let failed =
        |error: io::Error| Failure::system(&format!("cannot read {}", source.display()), &error);
    let mut file = File::open(source).map_err(failed)?;
    let mut output = io::BufWriter::with_capacity(256 << 10, Sink(outlet));
    if file.metadata().map_err(failed)?.is_dir() {
        warren::archive::pack(&mut output, file.into(), b"").map_err(|trouble| {
            Failure::fatal("files", format!("cannot pack {}: {trouble:?}", source.display()))
        })?;
    } else {
        io::copy(&mut file, &mut output).map_err(failed)?;
    }
    output.flush().map_err(failed)
}

struct Sink<'a>(&'a Outlet);

impl Write for Sink<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(bytes.to_vec().into())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn ls(args: &ClientArgs) -> Result<u8, Failure> {
    let page: Page<Value> = Client::new(args)?.get("/v1/templates")?;
    if args.json {
        page.items.iter().try_for_each(|item| show_object(item).map(|_| ()))?;
        return Ok(0);
    }
    let now = chrono_now();
    let mut rows = Vec::new();
    for item in page.items {
        let item: TemplateView = read(item)?;
        rows.push(vec![
            item.name,
            if item.tags.is_empty() { "-".to_owned() } else { item.tags.join(",") },
            item.id.to_string(),
            item.origin,
            age(now, item.created_at.timestamp()),
            Bytes(item.bytes).to_string(),
        ]);
    }
    let head = ["NAME", "TAGS", "ID", "FROM", "AGE", "SIZE"];
    printed(output::print(output::table(&head, rows).as_bytes()))
}

fn show(value: &Value, json: bool) -> Result<u8, Failure> {
    if json {
        return show_object(value);
    }
    let text = serde_json::to_string_pretty(value).unwrap_or_default();
    printed(output::print(format!("{text}\n").as_bytes()))
}
