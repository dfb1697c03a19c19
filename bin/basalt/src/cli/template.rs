//! The arguments of `basalt template`.

use clap::{Args, Subcommand};

/// `basalt template ...`.
#[derive(Debug, Subcommand)]
pub(crate) enum TemplateVerb {
    /// List the templates.
    Ls,
    /// Remove templates; sandboxes that were cloned of them run on.
    Rm(IdsArgs),
    /// Remove the templates that no sandbox can be cloned of any more.
    Prune(AllArgs),
}

/// Several templates.
#[derive(Args, Debug)]
pub(crate) struct IdsArgs {
    /// The templates' ids, or their beginnings.
    #[arg(required = true, value_name = "ID")]
    pub(crate) ids: Vec<String>,
}

/// `basalt template prune`.
#[derive(Args, Debug)]
pub(crate) struct AllArgs {
    /// All templates: the next sandbox of each kind boots, and makes another.
    #[arg(short, long)]
    pub(crate) all: bool,
}
