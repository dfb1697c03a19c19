//! Which program runs with which arguments: the image's entrypoint and command against what was asked for, as podman
//! decides it. Pure functions; nothing here knows how a command is run.

use anyhow::{Result, bail};

/// What an image says.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ImageCommand<'a> {
    /// `Entrypoint` of the image's configuration.
    pub(crate) entrypoint: &'a [String],
    /// `Cmd` of the image's configuration.
    pub(crate) cmd: &'a [String],
}

/// The argument vector to run.
///
/// The command that was given replaces the image's `Cmd`; a given entrypoint replaces the image's and drops its `Cmd`,
/// which was written for another program.
pub(crate) fn resolve(image: ImageCommand<'_>, entrypoint: Option<&str>, given: &[String]) -> Result<Vec<String>> {
    let mut argv = match entrypoint {
        Some(text) => parse_entrypoint(text)?,
        None => image.entrypoint.to_vec(),
    };
    if !given.is_empty() {
        argv.extend_from_slice(given);
    } else if entrypoint.is_none() {
        argv.extend_from_slice(image.cmd);
    }
    match argv.first().map(String::as_str) {
        None => bail!("the image names no command: write one after the image, as in `basalt run IMAGE -- sh`"),
        Some("") => bail!("the command is an empty word: write a program's name or path"),
        Some(_) => (),
    }
    if argv.iter().any(|word| word.contains('\0')) {
        bail!("the command holds a zero byte, which no argument can: remove it");
    }
    Ok(argv)
}

fn parse_entrypoint(text: &str) -> Result<Vec<String>> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    if text.starts_with('[') {
        return serde_json::from_str(text).map_err(|e| {
            anyhow::anyhow!("--entrypoint `{text}` is no JSON array of words ({e}): write a path, or [\"sh\", \"-c\"]")
        });
    }
    Ok(vec![text.to_owned()])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn resolved(entrypoint: &str, cmd: &str, flag: Option<&str>, given: &str) -> String {
        let (entrypoint, cmd) = (words(entrypoint), words(cmd));
        let image = ImageCommand {
            entrypoint: &entrypoint,
            cmd: &cmd,
        };
        resolve(image, flag, &words(given)).unwrap().join(" ")
    }

    #[test]
    fn the_table_of_overrides() {
        assert_eq!(resolved("", "python3", None, ""), "python3");
        assert_eq!(resolved("", "python3", None, "sh -c ls"), "sh -c ls");
        assert_eq!(
            resolved("docker-entrypoint", "redis-server", None, ""),
            "docker-entrypoint redis-server"
        );
        assert_eq!(
            resolved("docker-entrypoint", "redis-server", None, "sh"),
            "docker-entrypoint sh"
        );
        assert_eq!(
            resolved("docker-entrypoint", "redis-server", Some("/bin/sh"), ""),
            "/bin/sh"
        );
        assert_eq!(
            resolved("docker-entrypoint", "redis-server", Some("/bin/sh"), "-c ls"),
            "/bin/sh -c ls"
        );
        assert_eq!(
            resolved("docker-entrypoint", "redis-server", Some(""), "sh -c ls"),
            "sh -c ls"
        );
        assert_eq!(resolved("x", "y", Some(r#"["sh","-c"]"#), "ls"), "sh -c ls");
    }

    #[test]
    fn no_command_is_an_error_that_says_what_to_write() {
        let error = |flag| resolve(ImageCommand::default(), flag, &[]).unwrap_err().to_string();
        assert!(error(None).contains("write one after the image"));
        assert!(error(Some("")).contains("write one after the image"));
        assert!(error(Some("[1]")).contains("JSON array"));
        let empty = resolve(ImageCommand::default(), None, &[String::new()]).unwrap_err();
        assert!(empty.to_string().contains("empty word"));
    }
}
