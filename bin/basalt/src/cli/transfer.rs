//! The arguments of `save`, `load`, `push` and `pull` that snapshots and templates have in common, and what both ask for with them.

use std::path::PathBuf;

use clap::{Args, ValueHint};
use node_api::transfer::Kind;

use super::{RegistryArgs, SourceArgs};

/// Where one is saved.
#[derive(Args, Debug)]
pub(crate) struct SaveTo {
    /// The file; standard output otherwise, if that is no terminal.
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) output: Option<PathBuf>,

    /// Leave the image out: the host that loads the file must have it, or get it elsewhere.
    #[arg(long)]
    pub(crate) without_image: bool,
}

/// Where one is loaded from.
#[derive(Args, Debug)]
pub(crate) struct LoadFrom {
    /// The file; standard input otherwise.
    #[arg(short, long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) input: Option<PathBuf>,
}

/// Where one is pushed to.
#[derive(Args, Debug)]
pub(crate) struct PushTo {
    /// Print the digest only.
    #[arg(short, long)]
    pub(crate) quiet: bool,

    #[command(flatten)]
    pub(crate) registry: RegistryArgs,

    /// Where to: HOST[:PORT]/NAME[:TAG].
    pub(crate) destination: String,
}

/// Where one is pulled from.
#[derive(Args, Debug)]
pub(crate) struct PullFrom {
    /// Print the result only: a snapshot's name, a template's id.
    #[arg(short, long)]
    pub(crate) quiet: bool,

    #[command(flatten)]
    pub(crate) source: SourceArgs,

    /// Where it is: HOST[:PORT]/NAME[:TAG][@sha256:DIGEST].
    pub(crate) reference: String,
}

/// What is to be carried, and where.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Errand<'a> {
    pub(crate) kind: Kind,
    pub(crate) way: Way<'a>,
}

/// Out of the node with one of this name, or into it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way<'a> {
    Save(&'a str, &'a SaveTo),
    Load(Wish<'a>, &'a LoadFrom),
    Push(&'a str, &'a PushTo),
    Pull(Wish<'a>, &'a PullFrom),
}

/// What is to become of one that comes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish<'a> {
    /// What it is called, instead of as it was.
    pub(crate) name: Option<&'a str>,
    /// In place of what is there.
    pub(crate) force: bool,
}
