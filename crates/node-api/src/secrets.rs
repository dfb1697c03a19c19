//! What a node knows and may show: all but the values of environment variables, which whoever made a sandbox or a template
//! has given it, and which may be passwords. Whoever may ask the daemon can have them; nobody sees them by accident.

use observe::redact;

use crate::config::SandboxConfig;
use crate::sandbox::Sandbox;
use crate::snapshot::Snapshot;
use crate::template::{LoadedTemplate, Template};

/// Something with environment variables in it.
pub trait Secrets: Sized {
    /// The variables, as `NAME=value`.
    fn variables(&mut self) -> Option<&mut Vec<String>>;

    /// The same with `NAME=<redacted>` for each.
    #[must_use]
    fn redacted(mut self) -> Self {
        for variable in self.variables().into_iter().flatten() {
            *variable = redact::variable(variable.as_bytes());
        }
        self
    }
}

impl Secrets for SandboxConfig {
    fn variables(&mut self) -> Option<&mut Vec<String>> {
        Some(&mut self.process.env)
    }
}

impl Secrets for Sandbox {
    fn variables(&mut self) -> Option<&mut Vec<String>> {
        self.config.variables()
    }
}

impl Secrets for Snapshot {
    fn variables(&mut self) -> Option<&mut Vec<String>> {
        self.config.variables()
    }
}

impl Secrets for Template {
    fn variables(&mut self) -> Option<&mut Vec<String>> {
        self.recipe.as_mut().map(|recipe| &mut recipe.env)
    }
}

impl Secrets for LoadedTemplate {
    fn variables(&mut self) -> Option<&mut Vec<String>> {
        self.template.variables()
    }
}

#[cfg(test)]
mod tests {
    use crate::process::ProcessConfig;
    use crate::template::Recipe;

    const MARK: &str = "hunter2";

    #[test]
    fn debug_shows_no_value() {
        let env = vec![format!("A={MARK}")];
        let process = ProcessConfig {
            env: env.clone(),
            ..ProcessConfig::default()
        };
        let recipe = Recipe {
            env,
            ..Recipe::default()
        };
        for shown in [format!("{process:?}"), format!("{recipe:#?}")] {
            assert!(!shown.contains(MARK) && shown.contains("A=<redacted>"), "{shown}");
        }
    }
}
