//! The recipe of a template, as people write it: steps as in a Dockerfile.

use std::path::PathBuf;

use super::build::{Origin, Step, StepKind};
use crate::{Result, SandboxError};

/// What a recipe says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// What it begins with.
    pub origin: Origin,
    /// What is done.
    pub steps: Vec<Step>,
    /// What is started in each sandbox.
    pub start: Option<String>,
    /// What succeeds once that is ready.
    pub ready: Option<String>,
}

const KNOWN: &str = "FROM, RUN, COPY, ENV, WORKDIR, USER, CMD and HEALTHCHECK CMD";

/// Reads a recipe. `FROM host` is the host's toolchain, `FROM template:NAME` another template,
/// `FROM upload` an archive that is sent along, and anything else an image.
pub fn parse(text: &str) -> Result<Recipe> {
    let mut origin = None;
    let (mut steps, mut start, mut ready) = (Vec::new(), None, None);
    for (number, line) in joined(text) {
        let refused = |why: String| {
            SandboxError::invalid(format!("line {number}"), why, format!("a recipe has {KNOWN}"))
        };
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((&line, ""));
        let rest = rest.trim();
        let upper = word.to_ascii_uppercase();
        if rest.is_empty() {
            return Err(refused(format!("`{}` says nothing", word.escape_debug())));
        }
        if (upper == "FROM") != origin.is_none() {
            let why = match origin {
                None => "a recipe begins with FROM",
                Some(_) => "a recipe has one FROM",
            };
            return Err(refused(why.to_owned()));
        }
        let kind = match upper.as_str() {
            "FROM" => {
                origin = Some(from(rest).map_err(|error| refused(error.to_string()))?);
                continue;
            }
            "RUN" => StepKind::Run { command: command(rest).map_err(refused)?, user: None },
            "ENV" => StepKind::Env(variables(rest).map_err(refused)?),
            "WORKDIR" => StepKind::Workdir(PathBuf::from(rest)),
            "USER" => StepKind::User(rest.to_owned()),
            "COPY" => copy(rest).map_err(refused)?,
            "CMD" => {
                start = Some(command(rest).map_err(refused)?);
                continue;
            }
            "HEALTHCHECK" => {
                let Some(check) = rest.strip_prefix("CMD ") else {
                    return Err(refused("only `HEALTHCHECK CMD command` is known".to_owned()));
                };
                ready = Some(command(check.trim()).map_err(refused)?);
                continue;
            }
            _ => return Err(refused(format!("`{}` is no step", word.escape_debug()))),
        };
        steps.push(Step { kind, force: false });
    }
    let Some(origin) = origin else {
        let hint = format!("a recipe has {KNOWN}");
        return Err(SandboxError::invalid("recipe", "there is no FROM", hint));
    };
    Ok(Recipe { origin, steps, start, ready })
}

/// Returns the lines that say something, each whole and with the number of its first.
fn joined(text: &str) -> Vec<(usize, String)> {
    let mut lines = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (index, line) in text.lines().enumerate() {
        let plain = line.trim();
        if plain.starts_with('#') || (plain.is_empty() && open.is_none()) {
            continue;
        }
        let (number, mut whole) = open.take().unwrap_or((index + 1, String::new()));
        match plain.strip_suffix('\\') {
            Some(part) => {
                whole.push_str(part);
                open = Some((number, whole));
            }
            None => {
                whole.push_str(plain);
                lines.push((number, whole));
            }
        }
    }
    lines.extend(open);
    lines
}

fn from(text: &str) -> Result<Origin> {
    match text {
        "host" => return Ok(Origin::Host),
        "upload" => return Ok(Origin::Upload),
        _ => {}
    }
    match text.strip_prefix("template:") {
        Some(name) => Ok(Origin::Template(name.to_owned())),
        None => Ok(Origin::Image(text.parse().map_err(SandboxError::from)?)),
    }
}

/// Reads a command for a shell, or a list of arguments.
fn command(text: &str) -> Result<String, String> {
    if !text.starts_with('[') {
        return Ok(text.to_owned());
    }
    let arguments: Vec<String> =
        serde_json::from_str(text).map_err(|_| "the list of arguments is not closed".to_owned())?;
    let quoted: Vec<_> = arguments.iter().map(|word| quote(word)).collect();
    Ok(quoted.join(" "))
}

pub(super) fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Reads `A=b C="d e"`, or the older `A b`.
fn variables(text: &str) -> Result<Vec<(String, String)>, String> {
    let words = words(text)?;
    if let Some((name, value)) = text.split_once(char::is_whitespace)
        && !name.contains('=')
    {
        return Ok(vec![(name.to_owned(), value.trim().to_owned())]);
    }
    let pair = |word: String| match word.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("`{}` is no variable", word.escape_debug())),
    };
    words.into_iter().map(pair).collect()
}

/// Splits at spaces that are neither quoted nor escaped.
fn words(text: &str) -> Result<Vec<String>, String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match (letter, quote) {
            ('\\', None | Some('"')) => {
                let next = letters.next().ok_or("it ends with a backslash")?;
                word.get_or_insert_default().push(next);
            }
            (letter, Some(open)) if letter == open => quote = None,
            ('"' | '\'', None) => {
                word.get_or_insert_default();
                quote = Some(letter);
            }
            (letter, None) if letter.is_whitespace() => words.extend(word.take()),
            (letter, _) => word.get_or_insert_default().push(letter),
        }
    }
    if quote.is_some() {
        return Err("a quote is not closed".to_owned());
    }
    words.extend(word);
    Ok(words)
}

fn copy(text: &str) -> Result<StepKind, String> {
    let (mut user, mut mode) = (None, None);
    let mut paths = match text.starts_with('[') {
        true => serde_json::from_str(text).map_err(|_| "the list of paths is not closed")?,
        false => words(text)?,
    };
    while let Some(flag) = paths.first().filter(|word| word.starts_with("--")).cloned() {
        if let Some(owner) = flag.strip_prefix("--chown=") {
            user = Some(owner.split(':').next().unwrap_or_default().to_owned());
        } else if let Some(bits) = flag.strip_prefix("--chmod=") {
            let bits = u32::from_str_radix(bits, 8).ok().filter(|bits| *bits <= 0o777);
            mode = Some(bits.ok_or("--chmod takes an octal mode up to 777")?);
        } else {
            return Err(format!("COPY knows no `{}`", flag.escape_debug()));
        }
        paths.remove(0);
    }
    let (Some(target), sources) = (paths.pop(), paths) else {
        return Err("COPY takes a source and a target".to_owned());
    };
    if sources.is_empty() {
        return Err("COPY takes a source and a target".to_owned());
    }
    Ok(StepKind::Copy { sources, target, user, mode, context: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recipe_says_what_a_dockerfile_says() {
        let text = "\
# A comment
FROM python:3.12

ENV A=b C=\"d e\" \\
    # a comment within
    F=g
ENV OLD one two
RUN pip install \\
    flask
RUN [\"echo\", \"it's\"]
WORKDIR /srv
COPY --chown=app:app --chmod=755 a b /srv/
copy x y
USER app
HEALTHCHECK CMD curl -f localhost
CMD [\"python3\", \"app.py\"]
";
        let recipe = parse(text).unwrap();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let kinds: Vec<_> = recipe.steps.into_iter().map(|step| step.kind).collect();
        let copied = |sources: &[&str], target: &str, user: Option<&str>, mode| StepKind::Copy {
            sources: sources.iter().map(|source| (*source).to_owned()).collect(),
            target: target.to_owned(),
            user: user.map(str::to_owned),
            mode,
            context: None,
        };
        let run = |command: &str| StepKind::Run { command: command.to_owned(), user: None };
        assert_eq!(
            kinds,
            [
                StepKind::Env(vec![pair("A", "b"), pair("C", "d e"), pair("F", "g")]),
                StepKind::Env(vec![pair("OLD", "one two")]),
                run("pip install flask"),
                run(r"'echo' 'it'\''s'"),
                StepKind::Workdir("/srv".into()),
                copied(&["a", "b"], "/srv/", Some("app"), Some(0o755)),
                copied(&["x"], "y", None, None),
                StepKind::User("app".to_owned()),
            ]
        );
        assert_eq!(recipe.origin.to_string(), "docker.io/library/python:3.12");
        assert_eq!(recipe.start.as_deref(), Some("'python3' 'app.py'"));
        assert_eq!(recipe.ready.as_deref(), Some("curl -f localhost"));
        assert_eq!(parse("FROM host").unwrap().origin, Origin::Host);
        let other = parse("from template:mine:v1\nrun true").unwrap();
        assert_eq!(other.origin, Origin::Template("mine:v1".to_owned()));
    }

    #[test]
    fn what_is_no_recipe_is_refused_with_its_line() {
        for (text, line, why) in [
            ("", "recipe", "no FROM"),
            ("RUN true", "line 1", "begins with FROM"),
            ("FROM host\nFROM host", "line 2", "one FROM"),
            ("FROM host\n\nADD a b", "line 3", "`ADD` is no step"),
            ("FROM host\nRUN", "line 2", "says nothing"),
            ("FROM Bad Name", "line 1", "refused"),
            ("FROM host\nENV =x", "line 2", "no variable"),
            ("FROM host\nENV A=\"b", "line 2", "not closed"),
            ("FROM host\nCOPY a", "line 2", "source and a target"),
            ("FROM host\nCOPY --chmod=9 a b", "line 2", "octal"),
            ("FROM host\nCOPY --from=x a b", "line 2", "COPY knows no"),
            ("FROM host\nRUN [\"a\"", "line 2", "not closed"),
            ("FROM host\nHEALTHCHECK NONE", "line 2", "only"),
        ] {
            let error = parse(text).unwrap_err();
            let SandboxError::InvalidSpec { field, reason, .. } = &error else { panic!("{error}") };
            assert_eq!(field, line, "{text}: {error}");
            assert!(reason.contains(why), "{text}: {error}");
        }
    }
}
