//! What a sandbox is asked to run.

use std::fmt;

use observe::redact::Variables;
use serde::{Deserialize, Serialize};

/// What runs in it.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProcessConfig {
    /// In place of the image's entrypoint; an empty list is none at all.
    pub entrypoint: Option<Vec<String>>,
    /// In place of the image's command.
    pub command: Vec<String>,
    /// `NAME=value`, over the image's.
    pub env: Vec<String>,
    /// The first so many of them are of the specifications of its devices, and no clone's, which has none; the daemon counts them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub device_env: usize,
    /// In place of the image's working directory.
    pub workdir: Option<String>,
    /// In place of the image's user: `name|uid[:group|gid]`.
    pub user: Option<String>,
    /// It has a terminal.
    pub tty: bool,
    /// There is no command, the image's neither: it runs until it is stopped, for commands that are executed in it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub idle: bool,
}

fn is_zero(number: &usize) -> bool {
    *number == 0
}

impl ProcessConfig {
    /// Has its devices' variables be these, before those of its asker, which count where both say something.
    pub fn set_device_env(&mut self, variables: Vec<String>) {
        let before = self.device_env.min(self.env.len());
        self.device_env = variables.len();
        self.env.splice(..before, variables);
    }
}

impl fmt::Debug for ProcessConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            entrypoint,
            command,
            env,
            device_env,
            workdir,
            user,
            tty,
            idle,
        } = self;
        f.debug_struct("ProcessConfig")
            .field("entrypoint", entrypoint)
            .field("command", command)
            .field("env", &Variables(env))
            .field("device_env", device_env)
            .field("workdir", workdir)
            .field("user", user)
            .field("tty", tty)
            .field("idle", idle)
            .finish()
    }
}
