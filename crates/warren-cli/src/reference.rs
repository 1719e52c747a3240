//! What is generated from the command line's own description: completions, man pages, docs/cli.md.

use clap::{Command, CommandFactory as _};

use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::failure::Failure;
use crate::output;

/// Prints the completions of a shell.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<u8, Failure> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "warren", &mut text);
    print(&text)
}

/// Prints the man page, or writes one for each command to a directory.
pub(crate) fn man(args: &ManArgs) -> Result<u8, Failure> {
    let Some(dir) = &args.dir else {
        let mut page = Vec::new();
        let rendered = clap_mangen::Man::new(Cli::command()).render(&mut page);
        rendered.map_err(|error| Failure::system("cannot make the man page", &error))?;
        return print(&page);
    };
    std::fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), dir))
        .map_err(|error| Failure::system(&format!("cannot write to {}", dir.display()), &error))?;
    Ok(0)
}

/// Prints docs/cli.md.
pub(crate) fn markdown() -> Result<u8, Failure> {
    print(document().as_bytes())
}

fn print(text: &[u8]) -> Result<u8, Failure> {
    output::print(text).map_err(|error| Failure::system("cannot write to stdout", &error))?;
    Ok(0)
}

/// Writes the help of every command, as it is shown on a terminal of 100 columns.
fn document() -> String {
    let mut text = "# The command line\n\n\
        Generated from the program's own help. After a change: `WARREN_BLESS=1 cargo test -p warren-cli`.\n"
        .to_owned();
    let mut root = Cli::command().term_width(100);
    root.build();
    describe(&mut text, "warren", &mut root);
    text
}

/// Writes the help of a command and of those below it.
fn describe(text: &mut String, title: &str, command: &mut Command) {
    section(text, title, command);
    let names: Vec<String> = visible(command).map(|below| below.get_name().to_owned()).collect();
    for name in names {
        if let Some(below) = command.find_subcommand_mut(&name) {
            describe(text, &format!("{title} {name}"), below);
        }
    }
}

fn visible(command: &Command) -> impl Iterator<Item = &Command> {
    command
        .get_subcommands()
        .filter(|command| !command.is_hide_set() && command.get_name() != "help")
}

fn section(text: &mut String, title: &str, command: &mut Command) {
    let help = command.render_long_help().to_string();
    let lines: Vec<&str> = help.lines().map(str::trim_end).collect();
    text.push_str(&format!("\n## {title}\n\n```text\n{}\n```\n", lines.join("\n").trim_end()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_command_line_is_the_programs_own() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/cli.md");
        let now = document();
        if std::env::var_os("WARREN_BLESS").is_some() {
            std::fs::write(path, &now).expect("docs/cli.md can be written");
        }
        let published = std::fs::read_to_string(path).unwrap_or_default();
        assert!(published == now, "docs/cli.md is stale: WARREN_BLESS=1 cargo test -p warren-cli");
    }

    #[test]
    fn the_description_of_the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
