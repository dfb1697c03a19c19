//! The flags that say how a command runs: the same for `run`, `exec` and `template build`.

use std::fmt;
use std::path::PathBuf;

use clap::{Args, ValueHint};
use observe::redact::Variables;

use super::parse;

/// What a command finds around it, over what its image or its sandbox says.
#[derive(Args, Clone)]
pub(crate) struct ProcessArgs {
    /// Set an environment variable; KEY alone passes this environment's value on.
    #[arg(short, long, value_name = "KEY[=VALUE]", value_parser = parse::env)]
    pub(crate) env: Vec<String>,

    /// Read environment variables from a file, one KEY=VALUE a line.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) env_file: Vec<PathBuf>,

    /// Working directory.
    #[arg(short, long, value_name = "DIR", value_parser = parse::workdir)]
    pub(crate) workdir: Option<String>,

    /// User and group, by name or number.
    #[arg(short, long, value_name = "USER[:GROUP]", value_parser = parse::user)]
    pub(crate) user: Option<String>,
}

impl fmt::Debug for ProcessArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            env,
            env_file,
            workdir,
            user,
        } = self;
        f.debug_struct("ProcessArgs")
            .field("env", &Variables(env))
            .field("env_file", env_file)
            .field("workdir", workdir)
            .field("user", user)
            .finish()
    }
}

impl ProcessArgs {
    /// The same for a program elsewhere. Variables are not among them: everybody can read a program's arguments
    /// (`environment::passed`).
    pub(crate) fn words(&self) -> Vec<String> {
        let workdir = self.workdir.iter().map(|directory| format!("--workdir={directory}"));
        let user = self.user.iter().map(|user| format!("--user={user}"));
        workdir.chain(user).collect()
    }
}
