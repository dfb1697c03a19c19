//! How messages are printed that may hold secrets: a request to run a command shows the names of its variables, and not
//! their values.

use std::fmt;

use observe::redact::Variables;

use crate::message::{Environment, ExecRequest};

impl fmt::Debug for ExecRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            argv,
            env,
            cwd,
            user,
            tty,
            stdin,
            main,
            detached,
            kept,
        } = self;
        f.debug_struct("ExecRequest")
            .field("argv", argv)
            .field("env", &Variables(env))
            .field("cwd", cwd)
            .field("user", user)
            .field("tty", tty)
            .field("stdin", stdin)
            .field("main", main)
            .field("detached", detached)
            // A note may say anything.
            .field("kept", &kept.as_ref().map(|kept| &kept.tag))
            .finish()
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Environment").field(&Variables(&self.0)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_never_printed() {
        let request = ExecRequest {
            env: vec!["A=hunter2".into()],
            ..ExecRequest::default()
        };
        let environment = Environment(request.env.clone());
        let shown = format!("{request:?} {environment:?}");
        assert!(shown.contains("A=<redacted>") && !shown.contains("hunter2"), "{shown}");
    }
}
