//! `basalt template build`: the daemon makes the sandbox, the commands are run in it from here, and the daemon keeps it.
//!
//! ```text
//!  asked ─► command ─► ... ─► last command ─┬─► waited for ────────────────────┬─► kept
//!                                           └─► runs on ─► ready? ─► ready? ───┘
//! ```
//! The sandbox ends with this program's connection to the daemon, however that ends: nobody tidies up here. Knows nothing of how a
//! machine is kept.

use std::io::{self, Write};

use agent_api::{ExecRequest, OsText};
use anyhow::{Context, Result, anyhow};
use node_api::{BuildConfig, Client, Recipe, Reply, Request, Resources, Secrets as _, Template};
use template_build::Step;

use crate::cli::BuildArgs;
use crate::output::Output;
use crate::run::environment;
use crate::{daemon, images};

/// What comes of a command that fails.
const NONE: &str = "no template was made";

/// `basalt template build` on this host.
pub(crate) fn build(args: &BuildArgs, output: &Output) -> Result<u8> {
    let set = environment::given(&args.process.env_file, &args.process.env, environment::own)?;
    let config = configure(args, set);
    // Before an image is fetched for it.
    config.validate()?;
    let image = images::fetched(&args.from, args.pull, output)?;
    let template = made(BuildConfig { image, ..config }, output)?.redacted();
    output.result(&template, || format!("{}\n", template.id))?;
    Ok(0)
}

fn configure(args: &BuildArgs, env: Vec<String>) -> BuildConfig {
    BuildConfig {
        names: args.name.iter().cloned().collect(),
        replaces: None,
        image: args.from.clone(),
        resources: args.size.resources(),
        recipe: Recipe {
            commands: args.run.clone(),
            ready: args.ready.clone(),
            ready_ms: u64::try_from(args.timeout.as_millis()).unwrap_or(u64::MAX),
            env,
            workdir: args.process.workdir.clone(),
            user: args.process.user.clone(),
            network: args.network.mode(),
        },
        force: args.force,
        sized: false,
    }
}

/// The same for this program in the lab: files and this environment's variables have been read and are passed otherwise, the
/// image is named by its digest.
pub(crate) fn words(args: &BuildArgs, digest: &str) -> Vec<String> {
    let mut words = vec!["template".to_owned(), "build".to_owned(), format!("--from={digest}")];
    words.push("--pull=never".into());
    words.extend(args.size.words());
    words.push(format!("--network={}", args.network.word()));
    words.extend(args.force.then(|| "--force".to_owned()));
    words.extend(args.run.iter().map(|command| format!("--run={command}")));
    words.extend(args.process.words());
    let mut option = |name: &str, value: Option<&str>| words.extend(value.map(|value| format!("--{name}={value}")));
    option("name", args.name.as_deref());
    if let Some(ready) = &args.ready {
        option("ready", Some(ready));
        option("timeout", Some(&format!("{}ms", args.timeout.as_millis())));
    }
    words
}

/// A template of this name or id that a sandbox can be cloned of: built once more where what it was made with has changed.
pub(crate) fn up_to_date(wanted: &str, output: &Output) -> Result<Template> {
    let template = inspected(&mut daemon::connect()?, wanted)?;
    let (Some(recipe), Some(why)) = (template.recipe.clone(), template.outdated.clone()) else {
        // One without a recipe goes by itself, and the daemon says so.
        return Ok(template);
    };
    if let Err(error) = images::open(&format!("sha256:{}", template.digest)) {
        let name = template.name();
        return Err(error.context(format!(
            "the image of the template {name} is gone, and without it the template can neither be used nor built again: pull or \
             import the image, or remove the template (`basalt template rm {name}`)"
        )));
    }
    output.note(&format!("the template {} is built again, as {why}", template.name()));
    let config = BuildConfig {
        names: template.names.clone(),
        replaces: Some(template.id.clone()),
        image: format!("sha256:{}", template.digest),
        resources: template.resources.clone(),
        recipe,
        force: true,
        sized: template.sized,
    };
    let name = template.name().to_owned();
    made(config, output).with_context(|| format!("the template {name} cannot be built again"))
}

/// The same as large as this: found, or built by its recipe. One that nobody has built is what it is.
pub(crate) fn in_size(template: Template, resources: &Resources, output: &Output) -> Result<Template> {
    let (Some(recipe), false) = (template.recipe.clone(), template.resources == *resources) else {
        return Ok(template);
    };
    let config = BuildConfig {
        names: Vec::new(),
        replaces: None,
        image: format!("sha256:{}", template.digest),
        resources: resources.clone(),
        recipe,
        force: false,
        sized: true,
    };
    let name = template.name();
    made_with(config, output, || {
        let disk = resources
            .disk
            .map_or_else(|| "no disk".to_owned(), |disk| format!("a disk of {disk}"));
        output.note(&format!(
            "the template {name} is built for {} CPUs, {} of memory and {disk}, as there is none of that size yet",
            resources.cpus, resources.memory
        ));
    })
    .with_context(|| format!("the template {name} cannot be built in another size"))
}

/// What the daemon knows of it.
pub(crate) fn inspected(client: &mut Client, wanted: &str) -> Result<Template> {
    let template = wanted.to_owned();
    match client.ask(Request::InspectTemplate { template })? {
        (Reply::Template(template), _) => Ok(*template),
        (other, _) => Err(unexpected(&other)),
    }
}

/// Builds one, unless there is the same, and says so.
fn made(config: BuildConfig, output: &Output) -> Result<Template> {
    let mut begins = false;
    let template = made_with(config, output, || begins = true)?;
    if !begins {
        output.note(&format!(
            "there is the same template already, {}; --force builds it again",
            template.name()
        ));
    }
    Ok(template)
}

/// Builds one, unless there is the same; tells when it begins.
fn made_with(config: BuildConfig, output: &Output, begins: impl FnOnce()) -> Result<Template> {
    let recipe = config.recipe.clone();
    let mut client = daemon::connect()?;
    let (sandbox, command) = match client.ask(Request::BuildTemplate(Box::new(config)))? {
        (Reply::Template(template), _) => return Ok(*template),
        (Reply::Started { sandbox, command }, _) => (sandbox.id, command.unwrap_or_default()),
        (other, _) => return Err(unexpected(&other)),
    };
    begins();
    let mut builder = Builder {
        client,
        sandbox,
        command: *command,
        output,
    };
    match builder.build(&recipe) {
        Ok(template) => Ok(template),
        Err(error) => {
            // Nothing is left of it when this program ends; otherwise the connection's end sees to that a moment later.
            if let Err(error) = builder.client.ask(Request::Finish) {
                log::info!("the daemon was not notified that the build has ended: {error}");
            }
            Err(error)
        }
    }
}

/// A build under way.
struct Builder<'o> {
    client: Client,
    sandbox: String,
    /// What is common to all commands.
    command: ExecRequest,
    output: &'o Output,
}

impl Builder<'_> {
    fn build(&mut self, recipe: &Recipe) -> Result<Template> {
        let mut left = None;
        for (at, command) in recipe.commands.iter().enumerate() {
            let count = recipe.commands.len();
            self.output.note(&format!("{} of {count}: {command}", at + 1));
            let running = self.start(command, true)?;
            if at + 1 == count && recipe.ready.is_some() {
                left = Some((command.as_str(), running));
            } else {
                let ended = running
                    .ended(None)?
                    .context("a command without a limit was not waited for")?;
                template_build::Error::unless_succeeded(command, &ended).context(NONE)?;
            }
        }
        if let Some(check) = &recipe.ready {
            let left = left.as_ref().map(|(command, step)| (*command, step));
            let start = |script: &str| self.start(script, false);
            let waited = template_build::wait_until_ready(check, recipe.ready_limit(), left, start, || Ok(()));
            let waited = waited.context("no template was made; --timeout says how long is waited for the check")?;
            self.output.note(&format!("ready after {:.1} s", waited.as_secs_f64()));
        }
        self.output.note("keeping it as a template");
        let kept = self.client.ask(Request::KeepTemplate)?;
        // Its connection had to be there until then: its client would have left it otherwise.
        drop(left);
        match kept {
            (Reply::Template(template), _) => Ok(*template),
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Starts `sh -c` with this; its words may be shown.
    fn start(&mut self, script: &str, shown: bool) -> Result<Step> {
        let sandbox = self.sandbox.clone();
        let stream = match self.client.ask(Request::Exec { sandbox })? {
            (Reply::Agent { .. }, fds) => fds.into_iter().next(),
            (other, _) => return Err(unexpected(&other)),
        };
        let stream = stream.context("the daemon sent no connection: use basalt and basaltd of one build")?;
        let request = ExecRequest {
            argv: ["sh", "-c", script].map(OsText::from).to_vec(),
            main: false,
            stdin: false,
            ..self.command.clone()
        };
        let show = move |_, bytes: &[u8]| match shown {
            true => io::stderr().lock().write_all(bytes),
            false => Ok(()),
        };
        Ok(Step::start(stream.into(), request, show)?)
    }
}

fn unexpected(reply: &Reply) -> anyhow::Error {
    anyhow!("the daemon answered {reply:?}: use basalt and basaltd of one build")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, TemplateVerb, Verb};

    fn parse(words: &[String]) -> BuildArgs {
        let argv = ["basalt".to_owned()].into_iter().chain(words.iter().cloned());
        match Cli::try_parse_from(argv).unwrap().verb {
            Verb::Template(TemplateVerb::Build(args)) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_far_side_builds_the_same() {
        let near = [
            "template",
            "build",
            "--from",
            "python",
            "--name",
            "web",
            "--run",
            "-x y",
            "--run",
            "server --port=80",
            "--ready",
            "-z",
            "--timeout",
            "90s",
            "--cpus",
            "2",
            "-m",
            "256m",
            "--disk",
            "0",
            "--network",
            "none",
            "-e",
            "A",
            "-w",
            "/x",
            "-u",
            "1:2",
            "--force",
        ];
        let near = parse(&near.map(str::to_owned));
        let set = vec!["A=b c".to_owned()];
        let far = parse(&words(&near, "sha256:00"));
        assert!(far.process.env.is_empty());
        let wanted = BuildConfig {
            image: "sha256:00".into(),
            ..configure(&near, set.clone())
        };
        assert_eq!(configure(&far, set), wanted);
    }
}
