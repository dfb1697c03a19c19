//! The arguments of the verbs for images.

use std::path::PathBuf;

use clap::{ArgAction, Args, Subcommand, ValueEnum, ValueHint};
use registry::Credentials;

use super::parse;

/// What every way to a registry has.
#[derive(Args, Clone, Debug)]
pub(crate) struct RegistryArgs {
    /// Name and password; others on this machine can read them, and `podman login` stores them better.
    #[arg(long, value_name = "USER:PASSWORD", value_parser = parse::creds, hide_default_value = true)]
    pub(crate) creds: Option<Credentials>,

    /// The file with credentials, instead of podman's and docker's.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) authfile: Option<PathBuf>,

    /// `--tls-verify=false` takes any certificate, or none.
    #[arg(long, num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true")]
    #[arg(action = ArgAction::Set, value_name = "BOOL")]
    pub(crate) tls_verify: bool,

    /// A directory with certificates of authorities (*.crt) to trust besides the known ones.
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub(crate) cert_dir: Option<PathBuf>,
}

/// What every way from a registry has.
#[derive(Args, Clone, Debug)]
pub(crate) struct SourceArgs {
    /// Ask HOST[:PORT][/PREFIX] before the registry; again for more.
    #[arg(long, value_name = "HOST")]
    pub(crate) mirror: Vec<String>,

    #[command(flatten)]
    pub(crate) registry: RegistryArgs,
}

const PULL_HELP: &str = "\
Examples:
  basalt pull registry.example/team/python:3.11
  basalt pull --tls-verify=false 10.0.0.7:5000/redis
  basalt pull --mirror 10.0.0.7:5000/cache registry.example/team/python

An image is HOST[:PORT]/NAME[:TAG][@sha256:DIGEST]; no registry is asked that is not named. What has come of a pull that
broke or was interrupted is kept for a day, and the next one goes on there.";

/// `basalt pull`.
#[derive(Args, Debug)]
#[command(after_help = PULL_HELP)]
pub(crate) struct PullArgs {
    /// Print the digest only.
    #[arg(short, long)]
    pub(crate) quiet: bool,

    #[command(flatten)]
    pub(crate) source: SourceArgs,

    /// The image in its registry.
    pub(crate) image: String,
}

const PUSH_HELP: &str = "\
Examples:
  basalt push registry.example/team/python:3.11
  basalt push python registry.example/team/python:3.11

Without DESTINATION the image goes where its name says.";

/// `basalt push`.
#[derive(Args, Debug)]
#[command(after_help = PUSH_HELP)]
pub(crate) struct PushArgs {
    /// Print the digest only.
    #[arg(short, long)]
    pub(crate) quiet: bool,

    #[command(flatten)]
    pub(crate) registry: RegistryArgs,

    /// The image: a name, or a digest or its beginning.
    pub(crate) image: String,

    /// Where to: HOST[:PORT]/NAME[:TAG].
    pub(crate) destination: Option<String>,
}

/// `basalt tag`.
#[derive(Args, Debug)]
pub(crate) struct TagArgs {
    /// The image: a name, or a digest or its beginning.
    pub(crate) image: String,

    /// Names that it gets, too. An image that has one of them loses it.
    #[arg(required = true, value_name = "NAME", value_parser = parse::image_name)]
    pub(crate) names: Vec<String>,
}

const SAVE_HELP: &str = "\
Examples:
  basalt save -o python.tar python
  basalt save python | ssh there podman load";

/// `basalt save`.
#[derive(Args, Debug)]
#[command(after_help = SAVE_HELP)]
pub(crate) struct SaveArgs {
    /// The archive; standard output otherwise, if that is no terminal.
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) output: Option<PathBuf>,

    /// The archive's kind. Ours is both at once, so that this changes nothing.
    #[arg(long, value_name = "FORMAT")]
    pub(crate) format: Option<Format>,

    /// The image: a name, or a digest or its beginning.
    pub(crate) image: String,
}

/// Formats that an archive of ours has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    OciArchive,
    DockerArchive,
}

/// `basalt import`.
#[derive(Args, Debug)]
#[command(after_help = IMPORT_EXAMPLES)]
pub(crate) struct ImportArgs {
    /// Name of the image; by default the one that the archive carries.
    #[arg(short, long, value_parser = parse::image_name)]
    pub(crate) name: Option<String>,

    /// A directory with an OCI layout, or a tar archive of one, or a docker-archive (`docker save`); - is standard input.
    #[arg(value_hint = ValueHint::AnyPath)]
    pub(crate) path: PathBuf,
}

const IMPORT_EXAMPLES: &str = "\
Examples:
  podman save --format oci-archive -o python.tar python && basalt import --name python python.tar
  docker save -o redis.tar redis && basalt import redis.tar";

/// `basalt rmi`.
#[derive(Args, Debug)]
pub(crate) struct RmiArgs {
    /// Also those that sandboxes use: what runs goes on, and cannot be started again.
    #[arg(short, long)]
    pub(crate) force: bool,

    /// The images: names, or digests or their beginnings.
    #[arg(required = true, value_name = "IMAGE")]
    pub(crate) images: Vec<String>,
}

/// `basalt image ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum ImageVerb {
    /// Remove images without a name that no sandbox uses, and old downloads.
    Prune(PruneArgs),
}

/// `basalt image prune`.
#[derive(Args, Debug)]
pub(crate) struct PruneArgs {
    /// Also images with a name, and all interrupted downloads.
    #[arg(short, long)]
    pub(crate) all: bool,

    /// Accepted for podman's sake: there is no confirmation to skip.
    #[arg(short, long)]
    pub(crate) force: bool,
}

/// `basalt system ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum SystemVerb {
    /// Show what images, sandboxes and the rest take on this host's disk.
    Df(DfArgs),
}

/// `basalt system df`.
#[derive(Args, Debug)]
pub(crate) struct DfArgs {
    /// Each image and sandbox by itself.
    #[arg(short, long)]
    pub(crate) verbose: bool,
}

/// When `basalt run` pulls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PullPolicy {
    /// If it is not here, and its name says where it is.
    Missing,
    /// Each time; nothing but the manifest comes where it has not changed.
    Always,
    /// Not at all.
    Never,
}
