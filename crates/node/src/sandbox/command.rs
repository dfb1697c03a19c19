//! What a sandbox runs: its image's configuration against what was asked for, as podman decides it. Pure functions;
//! nothing here knows how a command is run.

use agent_api::{ExecRequest, OsText};
use image::ImageConfig;
use node_api::ProcessConfig;

use crate::Error;

/// The sandbox's own command; without a program where it has none, which is what commands in it begin with then.
///
/// # Errors
/// There is none, or it cannot be one.
pub(crate) fn command(image: &ImageConfig, asked: &ProcessConfig) -> Result<ExecRequest, Error> {
    let argv = match asked.idle {
        true => Vec::new(),
        false => arguments(image, asked)?,
    };
    let texts = |words: &[String]| words.iter().map(|word| OsText::from(word.as_str())).collect();
    let given = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    let workdir = asked.workdir.clone().or_else(|| given(&image.working_dir));
    Ok(ExecRequest {
        argv: texts(&argv),
        env: texts(&merge(&image.env, &asked.env)),
        cwd: OsText::from(workdir.as_deref().unwrap_or("/")),
        user: asked.user.clone().or_else(|| given(&image.user)),
        tty: None,
        stdin: false,
        main: true,
        detached: false,
        kept: None,
    })
}

/// The command that was given replaces the image's; a given entrypoint replaces the image's and drops the image's
/// command, which was written for another program.
fn arguments(image: &ImageConfig, asked: &ProcessConfig) -> Result<Vec<String>, Error> {
    let mut argv = asked.entrypoint.clone().unwrap_or_else(|| image.entrypoint.clone());
    if !asked.command.is_empty() {
        argv.extend_from_slice(&asked.command);
    } else if asked.entrypoint.is_none() {
        argv.extend_from_slice(&image.cmd);
    }
    let problem = match argv.first().map(String::as_str) {
        None => "the image names no command: write one after the image, as in `basalt run IMAGE -- sh`",
        Some("") => "the command is an empty word: write a program's name or path",
        Some(_) if argv.iter().any(|word| word.contains('\0')) => {
            "the command holds a zero byte, which no argument can: remove it"
        }
        Some(_) => return Ok(argv),
    };
    Err(Error::Command(problem))
}

/// Lays `over` upon `under`: one entry a name, in the order in which names first appear.
fn merge(under: &[String], over: &[String]) -> Vec<String> {
    let name = |variable: &str| variable.split('=').next().unwrap_or_default().to_owned();
    let mut merged: Vec<String> = Vec::with_capacity(under.len() + over.len());
    for variable in under.iter().chain(over) {
        match merged.iter_mut().find(|other| name(other) == name(variable)) {
            Some(other) => other.clone_from(variable),
            None => merged.push(variable.clone()),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    fn image(entrypoint: &str, cmd: &str) -> ImageConfig {
        ImageConfig {
            entrypoint: words(entrypoint),
            cmd: words(cmd),
            env: words("PATH=/bin A=1"),
            ..ImageConfig::default()
        }
    }

    fn resolved(entrypoint: &str, cmd: &str, flag: Option<&str>, given: &str) -> String {
        let asked = ProcessConfig {
            entrypoint: flag.map(words),
            command: words(given),
            ..ProcessConfig::default()
        };
        arguments(&image(entrypoint, cmd), &asked).unwrap().join(" ")
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
        assert_eq!(resolved("x", "y", Some("sh -c"), "ls"), "sh -c ls");
    }

    #[test]
    fn no_command_is_an_error_that_says_what_to_write() {
        let error = |entrypoint, command: Vec<String>| {
            let asked = ProcessConfig {
                entrypoint,
                command,
                ..ProcessConfig::default()
            };
            arguments(&image("", ""), &asked).unwrap_err().to_string()
        };
        assert!(error(None, vec![]).contains("write one after the image"));
        assert!(error(Some(vec![]), vec![]).contains("write one after the image"));
        assert!(error(None, vec![String::new()]).contains("empty word"));
        assert!(error(None, vec!["a\0".into()]).contains("zero byte"));
    }

    #[test]
    fn what_was_asked_for_wins_over_the_image() {
        let mut config = image("", "sh");
        (config.working_dir, config.user) = ("/srv".into(), "www".into());
        let plain = command(&config, &ProcessConfig::default()).unwrap();
        assert_eq!((plain.cwd, plain.user), ("/srv".into(), Some("www".into())));
        let asked = ProcessConfig {
            env: words("A=2 B=3 B=4"),
            workdir: Some("/tmp".into()),
            user: Some("0".into()),
            ..ProcessConfig::default()
        };
        let request = command(&config, &asked).unwrap();
        assert_eq!(request.env, ["PATH=/bin".into(), "A=2".into(), OsText::from("B=4")]);
        assert_eq!((request.cwd, request.user), ("/tmp".into(), Some("0".into())));
        assert!(request.main && !request.detached);
    }
}
