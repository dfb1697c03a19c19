//! Which file a program's name means: `PATH` of the command's own environment, relative to its working directory. Looks
//! at the root this process has; does not execute anything.

use std::ffi::OsStr;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use agent_api::{ExecFailure, FailureKind, OsText};

/// Where programs are looked for when the environment does not say.
pub(crate) const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The file to execute. A name with a slash is returned as it is: the kernel judges it.
pub(crate) fn find(program: &OsText, path: &[u8], cwd: &Path) -> Result<PathBuf, ExecFailure> {
    if program.as_bytes().contains(&b'/') {
        return Ok(PathBuf::from(program.as_os_str()));
    }
    let mut blocked = None;
    if !program.as_bytes().is_empty() {
        for dir in path.split(|byte| *byte == b':') {
            // An empty element is the working directory, as everywhere.
            let candidate = cwd.join(OsStr::from_bytes(dir)).join(program.as_os_str());
            match candidate.metadata() {
                Ok(data) if data.is_file() && data.permissions().mode() & 0o111 != 0 => return Ok(candidate),
                Ok(_) => blocked = blocked.or(Some(candidate)),
                Err(error) if error.kind() == ErrorKind::PermissionDenied => blocked = blocked.or(Some(candidate)),
                Err(_) => {}
            }
        }
    }
    Err(match blocked {
        Some(file) => ExecFailure {
            kind: FailureKind::NotExecutable,
            message: format!("{} is not an executable file", file.display()),
        },
        None => ExecFailure {
            kind: FailureKind::NotFound,
            message: format!(
                "no program {:?} in PATH ({})",
                program.to_string(),
                String::from_utf8_lossy(path)
            ),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(program: &str, path: &str) -> Result<PathBuf, FailureKind> {
        find(&program.into(), path.as_bytes(), Path::new("/etc")).map_err(|failure| failure.kind)
    }

    #[test]
    fn the_first_executable_file_wins() {
        assert_eq!(kind("sh", "/nowhere:/etc:/bin:/usr/bin"), Ok("/bin/sh".into()));
        assert_eq!(kind("./x", "/bin"), Ok("./x".into()));
    }

    #[test]
    fn files_that_are_no_programs_are_told_from_none() {
        assert_eq!(kind("passwd", "/etc"), Err(FailureKind::NotExecutable));
        assert_eq!(kind("passwd", ""), Err(FailureKind::NotExecutable));
        assert_eq!(kind("etc", "/"), Err(FailureKind::NotExecutable));
        assert_eq!(kind("no-such-program", "/bin:/etc"), Err(FailureKind::NotFound));
        assert_eq!(kind("", "/bin"), Err(FailureKind::NotFound));
    }
}
