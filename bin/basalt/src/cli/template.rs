//! The arguments of `basalt template`.

use std::time::Duration;

use clap::{Args, Subcommand, ValueHint};
use node_api::transfer::Kind;

use super::transfer::{Errand, LoadFrom, PullFrom, PushTo, SaveTo, Way, Wish};
use super::{Network, ProcessArgs, PullPolicy, SizeArgs, parse};

/// `basalt template ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum TemplateVerb {
    /// Boot an image, run commands in it, and keep the machine as it is then; `basalt run --template` clones it.
    Build(Box<BuildArgs>),
    /// List the templates.
    Ls,
    /// Show all that is known of templates, and how they were built.
    Inspect(InspectTemplatesArgs),
    /// Remove templates; sandboxes that were cloned of them run on.
    Rm(TemplatesArgs),
    /// Compare the files of templates with their checksums.
    Verify(VerifyTemplatesArgs),
    /// Remove the templates that `run` has made by itself and that no sandbox can be cloned of any more.
    Prune(AllArgs),
    #[command(flatten)]
    Files(TemplateFiles),
}

/// Those that read or write files of the caller, beside what the daemon has.
#[derive(Debug, Subcommand)]
pub(crate) enum TemplateFiles {
    /// Write a template that was built, with its image, to one file.
    Save(SaveTemplateArgs),
    /// Read a template that was saved.
    Load(LoadTemplateArgs),
    /// Send a template that was built to a registry.
    Push(PushTemplateArgs),
    /// Fetch a template from a registry.
    Pull(PullTemplateArgs),
}

impl TemplateFiles {
    pub(crate) fn errand(&self) -> Errand<'_> {
        Errand {
            kind: Kind::Template,
            way: match self {
                Self::Save(args) => Way::Save(&args.template, &args.to),
                Self::Load(args) => Way::Load(args.wish.wish(), &args.from),
                Self::Push(args) => Way::Push(&args.template, &args.to),
                Self::Pull(args) => Way::Pull(args.wish.wish(), &args.from),
            },
        }
    }
}

const SAVE_HELP: &str = "\
Examples:
  basalt template save -o web.basalt web
  basalt template save web | ssh there basalt template load

The file has all that was in the guest's memory, and how the template was built: keys and passwords too.";

/// `basalt template save`.
#[derive(Args, Debug)]
#[command(after_help = SAVE_HELP)]
pub(crate) struct SaveTemplateArgs {
    #[command(flatten)]
    to: SaveTo,

    /// The template: a name, or an id or its beginning.
    template: String,
}

const LOAD_HELP: &str = "\
Examples:
  basalt template load -i web.basalt
  basalt template load --name again < web.basalt
  basalt run --rm --template again true

It is good for hosts with the same VMM, kernel, agent and guest network; elsewhere it is refused, and has to be built there. Clones of it
go on only on a host with the same processor and kernel, unless it was built with --cpu-model.";

/// `basalt template load`.
#[derive(Args, Debug)]
#[command(after_help = LOAD_HELP)]
pub(crate) struct LoadTemplateArgs {
    #[command(flatten)]
    from: LoadFrom,

    #[command(flatten)]
    wish: WishArgs,
}

/// What is to become of one that comes.
#[derive(Args, Debug)]
pub(crate) struct WishArgs {
    /// What the template is called, instead of as it was.
    #[arg(long, value_name = "NAME", value_parser = name)]
    name: Option<String>,

    /// Put it in place of the same template, and take its names from others; one that has no name left goes.
    #[arg(long)]
    force: bool,
}

impl WishArgs {
    fn wish(&self) -> Wish<'_> {
        Wish {
            name: self.name.as_deref(),
            force: self.force,
        }
    }
}

const PUSH_HELP: &str = "\
Examples:
  basalt template push web registry.example/team/web:1
  basalt template pull --name web-1 registry.example/team/web:1

Its image goes its own way, by `basalt push` and `basalt pull`.";

/// `basalt template push`.
#[derive(Args, Debug)]
#[command(after_help = PUSH_HELP)]
pub(crate) struct PushTemplateArgs {
    /// The template: a name, or an id or its beginning.
    template: String,

    #[command(flatten)]
    to: PushTo,
}

/// `basalt template pull`.
#[derive(Args, Debug)]
#[command(after_help = PUSH_HELP)]
pub(crate) struct PullTemplateArgs {
    #[command(flatten)]
    wish: WishArgs,

    #[command(flatten)]
    from: PullFrom,
}

const BUILD_HELP: &str = "\
Examples:
  basalt template build --from python --name web --run 'pip install flask' --run 'python3 -m http.server 80' \\
      --ready 'python3 -c \"import urllib.request; urllib.request.urlopen(\\\"http://localhost\\\")\"'
  basalt run -d --template web -p 8080:80 sleep infinity
  basalt template build --from debian --name tools --run 'apt-get update && apt-get install -y git'
  basalt run --rm -it --template tools bash

What the commands write is shown on standard error; the template's id is the result. A command that ends with another code than 0 ends the build, and so does Ctrl-C: nothing stays then.";

/// `basalt template build`.
#[derive(Args, Clone, Debug)]
#[command(after_help = BUILD_HELP)]
pub(crate) struct BuildArgs {
    /// The image: a name, or a digest or its beginning.
    #[arg(long, value_name = "IMAGE")]
    pub(crate) from: String,

    /// What the template is called, in place of one that is called so.
    #[arg(long, value_name = "NAME", value_parser = name)]
    pub(crate) name: Option<String>,

    /// Run a command by `sh -c`; again for more, one after the other.
    #[arg(long, value_name = "COMMAND", allow_hyphen_values = true, value_hint = ValueHint::CommandString)]
    pub(crate) run: Vec<String>,

    /// Ask this command, by `sh -c`, until it ends with 0; the last --run may run on, and does so in each clone.
    #[arg(long, value_name = "COMMAND", allow_hyphen_values = true, value_hint = ValueHint::CommandString)]
    pub(crate) ready: Option<String>,

    /// How long --ready may take, such as 30s or 5m.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse::duration, requires = "ready")]
    pub(crate) timeout: Duration,

    #[command(flatten)]
    pub(crate) size: SizeArgs,

    /// How it reaches the world, and its clones too: `none` not at all, `node` by the node's network, `auto` so if the node has one.
    #[arg(long, value_name = "MODE", default_value = "auto")]
    pub(crate) network: Network,

    #[command(flatten)]
    pub(crate) process: ProcessArgs,

    /// Build it also if there is the same one.
    #[arg(long, visible_alias = "no-cache")]
    pub(crate) force: bool,

    /// When to fetch the image from its registry.
    #[arg(long, value_name = "WHEN", default_value = "missing")]
    pub(crate) pull: PullPolicy,
}

fn name(text: &str) -> Result<String, String> {
    node_api::check_template_name(text)
        .map(|()| text.to_owned())
        .map_err(|error| error.to_string())
}

/// Several templates.
#[derive(Args, Debug)]
pub(crate) struct TemplatesArgs {
    /// The templates' names, or their ids or the beginnings of these.
    #[arg(required = true, value_name = "TEMPLATE")]
    pub(crate) templates: Vec<String>,
}

const VERIFY_HELP: &str = "\
Examples:
  basalt template verify web
  basalt template verify --all

Each damaged part is named by file and offset, and by its guest physical address if it is memory; the exit code is 1 then. A damaged template that
was built is built again when the next sandbox of it is run; one that `run` has made by itself is removed, and made again.";

/// `basalt template verify`.
#[derive(Args, Debug)]
#[command(after_help = VERIFY_HELP)]
pub(crate) struct VerifyTemplatesArgs {
    /// All templates.
    #[arg(short, long, conflicts_with = "templates")]
    pub(crate) all: bool,

    /// The templates' names, or their ids or the beginnings of these.
    #[arg(required_unless_present = "all", value_name = "TEMPLATE")]
    pub(crate) templates: Vec<String>,
}

/// `basalt template inspect`.
#[derive(Args, Debug)]
pub(crate) struct InspectTemplatesArgs {
    /// Show the values of environment variables, too.
    #[arg(long)]
    pub(crate) show_secrets: bool,

    #[command(flatten)]
    pub(crate) of: TemplatesArgs,
}

/// `basalt template prune`.
#[derive(Args, Debug)]
pub(crate) struct AllArgs {
    /// All templates, those too that were built.
    #[arg(short, long)]
    pub(crate) all: bool,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Verb};

    fn build(args: &[&str]) -> Result<BuildArgs, String> {
        let argv = ["basalt", "template", "build"].iter().chain(args);
        match Cli::try_parse_from(argv).map_err(|error| error.to_string())?.verb {
            Verb::Template(TemplateVerb::Build(args)) => Ok(*args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn commands_keep_their_order_and_may_look_like_flags() {
        let args = build(&["--from", "python", "--run", "a b", "--run", "-x", "--no-cache"]).unwrap();
        assert_eq!((args.run, args.force), (vec!["a b".into(), "-x".into()], true));
        assert_eq!(args.timeout, Duration::from_secs(600));
    }

    #[test]
    fn what_comes_may_have_another_name_and_take_others_places() {
        let argv = ["basalt", "template", "pull", "--force", "--name", "x", "host/web:1"];
        let Verb::Template(TemplateVerb::Files(files)) = Cli::try_parse_from(argv).unwrap().verb else {
            panic!("another verb");
        };
        let errand = files.errand();
        let Way::Pull(wish, from) = errand.way else {
            panic!("{errand:?}");
        };
        assert_eq!((errand.kind, wish.name, wish.force), (Kind::Template, Some("x"), true));
        assert_eq!(from.reference, "host/web:1");
        let refused = Cli::try_parse_from(["basalt", "snapshot", "load", "--force"]).unwrap_err();
        assert!(refused.to_string().contains("--force"), "{refused}");
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (args, wanted) in [
            (&["--name", "x"][..], "--from"),
            (&["--from", "i", "--name", "a/b"], "template's name"),
            (&["--from", "i", "--timeout", "5s"], "--ready"),
        ] {
            let refusal = build(args).unwrap_err();
            assert!(refusal.contains(wanted), "{args:?}: {refusal}");
        }
    }
}
