//! The command line: reads the arguments, does one verb, turns its outcome into an exit code.
//!
//! Each verb has its file; what they share is in `places` (where things are) and `output` (how things are shown).

mod accel;
mod asked;
mod attached;
mod bar;
mod bare;
mod cdi_spec;
mod cli;
mod copy;
mod daemon;
mod devices;
mod doctor;
mod environment;
mod exec;
mod gateway;
mod generate;
mod host_cpus;
mod images;
mod interrupt;
mod lab;
mod log_reader;
mod logs;
mod memory;
mod network;
mod outlet;
mod output;
mod passthrough;
mod places;
mod published;
mod run;
mod sandboxes;
mod site;
mod snapshots;
mod template_build;
mod templates;
mod trace;
mod transfer;
mod verify;
mod volumes;

use std::ffi::{OsStr, OsString};
use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, Concern, ImageVerb, LogLevel, SnapshotVerb, SystemVerb, TemplateVerb, Verb};
use crate::interrupt::Interrupted;
use crate::output::Output;
use crate::site::Site;
use crate::trace::Tracing;

/// Basalt itself failed in `run` or `exec`, where every other code belongs to the command (podman's convention).
const EXIT_RUN_FAILED: u8 = 125;

/// Another verb failed.
const EXIT_FAILED: u8 = 1;

/// Another verb was given arguments that it does not know.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let began_ns = observe::span::now_ns();
    let argv = help_is_a_flag(std::env::args_os().collect());
    let for_run = is_run(&argv);
    let cli = match Cli::try_parse_from(&argv) {
        Ok(cli) => cli,
        Err(error) => return usage(&error, &argv, for_run),
    };
    let output = Output::new(cli.json);
    if let Err(error) = observe::logger::init("basalt: ", cli.log_level.into()) {
        output.error(&error.into());
        return ExitCode::from(EXIT_FAILED);
    }
    let tracing = Tracing::of(&cli.verb, began_ns, &output);
    let outcome = tracing.follow(|| carry_out(cli, &argv, &output));
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output.error(&error);
            let failed = if for_run { EXIT_RUN_FAILED } else { EXIT_FAILED };
            let interrupted = error.downcast_ref::<Interrupted>().map(Interrupted::exit_code);
            ExitCode::from(interrupted.unwrap_or(failed))
        }
    }
}

fn carry_out(cli: Cli, argv: &[OsString], output: &Output) -> anyhow::Result<u8> {
    let named = site::gateway(cli.host.as_deref());
    match cli.verb {
        verb if verb.concern() == Concern::Sandboxes || (named.is_some() && verb.concern() == Concern::Images) => {
            match Site::resolve(named)? {
                Site::Local => here(verb, output),
                Site::Lab { why } => in_lab(verb, &why, (cli.log_level, argv), output),
                Site::Gateway { url } => gateway::verb(&verb, &url, argv, output),
            }
        }
        Verb::Published => published::published(),
        Verb::AgentStream(args) => exec::stream(&args.one.sandbox),
        Verb::Images => images::list(output),
        Verb::Pull(args) => images::pull(&args, output),
        Verb::Push(args) => images::push(&args, output),
        Verb::Tag(args) => images::tag(&args, output),
        Verb::Save(args) => images::save(&args, output),
        Verb::Import(args) => images::import(&args, output),
        Verb::Rmi(args) => images::remove(&args, output),
        Verb::Image(ImageVerb::Prune(args)) => images::prune(&args, output),
        Verb::System(SystemVerb::Df(args)) => images::df(&args, output),
        Verb::Doctor => doctor::doctor(output),
        Verb::Lab(args) => lab::forward(&args.arguments),
        Verb::Env(args) => environment::environment(&args.arguments, cli.json),
        Verb::Completion { shell } => generate::completion(shell),
        Verb::Man { directory } => generate::man(&directory, output),
        Verb::Version => output.version(),
        other => Err(anyhow::anyhow!(
            "the verb {other:?} is not handled: this is a bug of basalt, please report it"
        )),
    }
}

/// A verb for sandboxes in the lab.
fn in_lab(verb: Verb, why: &str, (log_level, argv): (LogLevel, &[OsString]), output: &Output) -> anyhow::Result<u8> {
    let words = argv.get(1..).unwrap_or_default();
    match verb {
        Verb::Run(args) => run::in_lab(&args, why, log_level, output),
        Verb::Exec(args) => lab::exec(&args, output),
        Verb::Cp(args) => lab::cp(&args, output),
        Verb::Clone(args) => lab::clone(&args, log_level, output),
        Verb::Snapshot(SnapshotVerb::Files(verb)) => transfer::in_lab(verb.errand(), output),
        Verb::Template(TemplateVerb::Files(verb)) => transfer::in_lab(verb.errand(), output),
        Verb::Template(TemplateVerb::Build(args)) => lab::build(&args, output),
        Verb::Start(args) => lab::restart(&args.sandboxes, words),
        Verb::Restart(args) => lab::restart(&args.many.sandboxes, words),
        Verb::Rollback(args) => lab::restart(&[args.sandbox], words),
        _ => lab::verb(words, lab::Streams::default()),
    }
}

/// A verb for sandboxes on this host.
fn here(verb: Verb, output: &Output) -> anyhow::Result<u8> {
    match verb {
        Verb::Run(args) => run::here(&args, output),
        Verb::Exec(args) => exec::exec(&args, output),
        Verb::Cp(args) => copy::copy(&args, &exec::agent, output),
        Verb::Ps(args) => sandboxes::ps(&args, output),
        Verb::Logs(args) => logs::logs(&args, output),
        Verb::Start(args) => sandboxes::start(&args, output),
        Verb::Stop(args) => sandboxes::stop(&args, output),
        Verb::Restart(args) => sandboxes::restart(&args, output),
        Verb::Kill(args) => sandboxes::kill(&args, output),
        Verb::Pause(args) => sandboxes::pause(&args, output),
        Verb::Unpause(args) => sandboxes::unpause(&args, output),
        Verb::Suspend(args) => sandboxes::suspend(&args, output),
        Verb::Wait(args) => sandboxes::wait(&args, output),
        Verb::Rm(args) => sandboxes::rm(&args, output),
        Verb::Prune(args) => sandboxes::prune(&args, output),
        Verb::Inspect(args) => sandboxes::inspect(&args, output),
        Verb::Stats(args) => sandboxes::stats(&args, output),
        Verb::Events => sandboxes::events(output),
        Verb::Host(verb) => host_cpus::host(&verb, output),
        Verb::Device(verb) => devices::device(&verb, output),
        Verb::Accel(verb) => accel::accel(&verb, output),
        Verb::Volume(verb) => volumes::volume(&verb, output),
        Verb::Snapshot(verb) => snapshots::snapshot(&verb, output),
        Verb::Template(verb) => templates::template(&verb, output),
        Verb::Clone(args) => snapshots::clone(&args, output),
        Verb::Rollback(args) => snapshots::rollback(&args, output),
        Verb::Move(args) => snapshots::move_to(&args, output),
        Verb::Update(args) => memory::update(&args, output),
        Verb::Network(verb) => network::network(&verb, output),
        Verb::Daemon(args) => daemon::tell(&args, output),
        other => Err(anyhow::anyhow!(
            "the verb {other:?} is not handled: this is a bug of basalt, please report it"
        )),
    }
}

/// Help and version are no errors; everything else that clap says is one of usage.
fn usage(error: &clap::Error, argv: &[OsString], for_run: bool) -> ExitCode {
    if error.use_stderr() && argv.iter().any(|a| a == "--json") {
        let text = error.to_string();
        let sentence = text.lines().next().unwrap_or_default();
        Output::new(true).error(&anyhow::anyhow!("{}", sentence.trim_start_matches("error: ")));
    } else if error.print().is_err() {
        return ExitCode::from(EXIT_FAILED);
    }
    match (error.use_stderr(), for_run) {
        (false, _) => ExitCode::SUCCESS,
        (true, true) => ExitCode::from(EXIT_RUN_FAILED),
        (true, false) => ExitCode::from(EXIT_USAGE),
    }
}

/// Tells the verbs whose exit code is a command's from the others, before the arguments are known to be right.
fn is_run(argv: &[OsString]) -> bool {
    verb_at(argv).is_some_and(|at| argv[at] == "run" || argv[at] == "exec")
}

/// Where the verb is, behind the flags that belong to all of them.
fn verb_at(argv: &[OsString]) -> Option<usize> {
    let mut words = argv.iter().enumerate().skip(1);
    while let Some((at, word)) = words.next() {
        if word == OsStr::new("--log-level") || word == OsStr::new("--host") {
            words.next();
        } else if !word.as_encoded_bytes().starts_with(b"-") {
            return Some(at);
        }
    }
    None
}

/// Makes `help VERB` what it means, `VERB --help`: for `lab` another program has the answer. `help` alone is clap's.
fn help_is_a_flag(mut argv: Vec<OsString>) -> Vec<OsString> {
    if let Some(at) = verb_at(&argv).filter(|&at| argv[at] == "help")
        && argv
            .get(at + 1)
            .is_some_and(|verb| verb != "help" && !verb.as_encoded_bytes().starts_with(b"-"))
    {
        argv.remove(at);
        argv.insert(at + 1, "--help".into());
    }
    argv
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run_is_recognised_behind_global_flags_only() {
        let is = |words: &[&str]| is_run(&words.iter().map(OsString::from).collect::<Vec<_>>());
        assert!(is(&["basalt", "run", "--bogus"]));
        assert!(is(&["basalt", "--json", "--log-level", "info", "run"]));
        assert!(is(&["basalt", "--log-level=info", "run"]));
        assert!(is(&["basalt", "--host", "https://api.example", "run"]));
        assert!(!is(&["basalt", "images", "run"]));
        assert!(!is(&["basalt", "--log-level", "run"]));
        assert!(!is(&["basalt"]));
    }

    #[test]
    fn help_with_a_verb_is_the_verbs_flag() {
        let becomes = |words: &[&str]| help_is_a_flag(words.iter().map(OsString::from).collect());
        assert_eq!(becomes(&["basalt", "help", "run"]), ["basalt", "run", "--help"]);
        assert_eq!(
            becomes(&["basalt", "--json", "help", "lab", "up"]),
            ["basalt", "--json", "lab", "--help", "up"]
        );
        for unchanged in [
            &["basalt", "help"][..],
            &["basalt", "run", "help", "run"],
            &["basalt", "help", "--json"],
        ] {
            assert_eq!(becomes(unchanged), unchanged);
        }
    }
}
