//! The command's environment: the image's, then files, then flags, the later winning. Files and this process's own
//! environment are read here, on the near side, also when the sandbox runs in the lab.

use std::fs;
use std::path::{Path, PathBuf};

use agent_api::OsText;
use anyhow::{Context, Result, bail};

/// Under these names, with a number behind, a program that starts this one elsewhere passes it the variables that it has read.
/// They may be secrets: everybody can read a program's arguments, and nobody but its user its environment.
pub(crate) const PASSED: &str = "BASALT_PASSED_ENV_";

/// Those that the program there is started with.
pub(crate) fn passed(set: &[String]) -> impl Iterator<Item = String> {
    set.iter()
        .enumerate()
        .map(|(index, variable)| format!("{PASSED}{index}={variable}"))
}

/// `KEY=VALUE` for each variable that was passed, or that files and flags set, in their order; `lookup` is this process's environment.
pub(crate) fn given(
    files: &[PathBuf],
    flags: &[String],
    lookup: impl Fn(&str) -> Result<Option<String>>,
) -> Result<Vec<String>> {
    let mut set = Vec::new();
    while let Some(variable) = lookup(&format!("{PASSED}{}", set.len()))? {
        set.push(variable);
    }
    for file in files {
        let text = fs::read_to_string(file)
            .with_context(|| format!("the environment file {} cannot be read", file.display()))?;
        read_lines(file, &text, &lookup, &mut set)?;
    }
    for flag in flags {
        set.extend(complete(flag, &lookup)?);
    }
    if let Some(bad) = set.iter().find(|variable| variable.contains('\0')) {
        bail!(
            "the variable {} holds a zero byte, which no variable can: remove it",
            key(bad)
        );
    }
    Ok(set)
}

fn read_lines(
    file: &Path,
    text: &str,
    lookup: &impl Fn(&str) -> Result<Option<String>>,
    set: &mut Vec<String>,
) -> Result<()> {
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_start();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if key(line).is_empty() || key(line).contains(char::is_whitespace) {
            // It may be a line of a secret.
            bail!("{}, line {} is not KEY=VALUE", file.display(), index + 1);
        }
        set.extend(complete(line, lookup)?);
    }
    Ok(())
}

/// `KEY` alone takes this environment's value, and is dropped where there is none.
fn complete(variable: &str, lookup: &impl Fn(&str) -> Result<Option<String>>) -> Result<Option<String>> {
    if variable.contains('=') {
        return Ok(Some(variable.to_owned()));
    }
    Ok(lookup(variable)?.map(|value| format!("{variable}={value}")))
}

fn key(variable: &str) -> &str {
    variable.split('=').next().unwrap_or_default()
}

/// A variable of this process.
pub(crate) fn own(name: &str) -> Result<Option<String>> {
    match std::env::var(name) {
        Ok(value) => Ok(Some(value)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => {
            bail!("the variable {name} of this environment is not UTF-8 text: set it with --env {name}=VALUE")
        }
    }
}

/// Lays `over` upon a sandbox's environment: one entry a name, in the order in which names first appear.
pub(crate) fn merge_texts(under: &[OsText], over: &[String]) -> Vec<OsText> {
    let name = |text: &OsText| text.as_bytes().split(|&byte| byte == b'=').next().map(<[u8]>::to_vec);
    let mut merged = under.to_vec();
    for variable in over {
        let variable = OsText::from(variable.as_str());
        match merged.iter_mut().find(|other| name(other) == name(&variable)) {
            Some(other) => *other = variable,
            None => merged.push(variable),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(items: &[&str]) -> Vec<String> {
        items.iter().map(|s| (*s).to_owned()).collect()
    }

    fn host(key: &str) -> Result<Option<String>> {
        Ok((key == "HOME").then(|| "/root".to_owned()))
    }

    #[test]
    fn the_later_one_wins_and_keeps_its_place() {
        let under = ["PATH=/bin", "A=1"].map(OsText::from);
        let merged = merge_texts(&under, &strings(&["A=2", "B=3", "B=4"]));
        assert_eq!(merged, ["PATH=/bin", "A=2", "B=4"].map(OsText::from));
    }

    #[test]
    fn a_key_alone_is_this_environments() {
        let set = given(&[], &strings(&["HOME", "NONE", "E=", "X=a=b"]), host).unwrap();
        assert_eq!(set, ["HOME=/root", "E=", "X=a=b"]);
    }

    #[test]
    fn what_is_passed_is_the_same_there() {
        let set = strings(&["A=b c", "PATH=/x", "E="]);
        let there: Vec<String> = passed(&set).collect();
        let lookup = |key: &str| {
            let found = there.iter().find_map(|one| one.strip_prefix(key)?.strip_prefix('='));
            Ok(found.map(str::to_owned))
        };
        assert_eq!(given(&[], &[], lookup).unwrap(), set);
    }

    #[test]
    fn files_have_comments_and_errors_have_line_numbers() {
        let mut set = Vec::new();
        let file = Path::new("f.env");
        read_lines(file, "# c\n\n A=1 # kept\nHOME\n", &host, &mut set).unwrap();
        assert_eq!(set, ["A=1 # kept", "HOME=/root"]);
        let error = read_lines(file, "A=1\n=2\n", &host, &mut set).unwrap_err().to_string();
        assert!(error.contains("f.env, line 2 is not"), "{error}");
        let error = read_lines(file, "A=1\nhunter 2", &host, &mut set).unwrap_err();
        assert!(!format!("{error:?}").contains("hunter"), "{error:?}");
        assert!(read_lines(file, "two words=1\n", &host, &mut set).is_err());
        let missing = given(&[PathBuf::from("/nonexistent/env")], &[], host).unwrap_err();
        assert!(
            format!("{missing:#}").contains("/nonexistent/env cannot be read"),
            "{missing:#}"
        );
    }
}
