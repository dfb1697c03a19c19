//! The group whose members may ask the daemon, as /etc/group has it. Groups that are kept elsewhere (LDAP) are given by number.

use std::fs;
use std::io;

use anyhow::{Context, Result, bail};

/// The group that the Debian package makes.
const USUAL: &str = "basalt";

const FILE: &str = "/etc/group";

/// The number of a group that is named, or numbered.
pub(crate) fn named(name: &str) -> Result<u32> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    match find(&read()?, name) {
        Some(number) => Ok(number),
        None => {
            bail!("--group {name}: {FILE} has no such group; make it (`groupadd --system {name}`), or give its number")
        }
    }
}

/// The number of the usual group, if there is one.
pub(crate) fn usual() -> Result<Option<u32>> {
    Ok(find(&read()?, USUAL))
}

fn read() -> Result<String> {
    match fs::read_to_string(FILE) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        read => read.with_context(|| format!("{FILE} cannot be read, so it is not known who may ask the daemon")),
    }
}

/// group(5): `name:password:number:members`.
fn find(text: &str, name: &str) -> Option<u32> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let found = fields.next() == Some(name);
        fields.nth(1).filter(|_| found)?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_found_by_its_whole_name() {
        let text = "root:x:0:\nbasalt-x:x:7:\n# basalt\nbasalt:x:993:alice,bob\nbad:x\n";
        assert_eq!(find(text, "basalt"), Some(993));
        assert_eq!(find(text, "root"), Some(0));
        assert_eq!(find(text, "bas"), None);
        assert_eq!(find(text, "bad"), None);
    }

    #[test]
    fn a_number_needs_no_file_and_an_unknown_name_says_what_to_do() {
        assert_eq!(named("4711").unwrap(), 4711);
        let error = named("no-such-group-here").unwrap_err().to_string();
        assert!(error.contains("groupadd"), "{error}");
    }
}
