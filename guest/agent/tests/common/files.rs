//! What the tests of files share: names for what is asked and for what fails.

use std::path::Path;
use std::process::Command;

use agent_api::{Entry, Error, ExitStatus, RequestFailureKind};
use tempfile::TempDir;

/// Somebody without a name, whose home is `/`.
pub(crate) const NOBODY: Option<&str> = Some("4242:4343");

/// A directory that goes with the test.
pub(crate) fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

/// A path in it.
pub(crate) fn at(dir: &TempDir, name: &str) -> String {
    dir.path().join(name).to_str().unwrap().to_owned()
}

/// Why it failed, which it must.
pub(crate) fn kind_of<T: std::fmt::Debug>(result: Result<T, Error>) -> RequestFailureKind {
    match result {
        Err(Error::RequestFailed(failure)) => failure.kind,
        other => panic!("{other:?}"),
    }
}

/// Paths relative to a directory.
pub(crate) fn names(entries: &[Entry], below: &TempDir) -> Vec<String> {
    let names = entries.iter().map(|entry| Path::new(entry.path.as_os_str()));
    names
        .map(|path| path.strip_prefix(below.path()).unwrap().to_str().unwrap().to_owned())
        .collect()
}

/// Runs a program that must succeed.
pub(crate) fn run(argv: &[&str]) {
    let mut command = Command::new(argv[0]);
    command.args(&argv[1..]);
    let status = super::reaper().spawn(&mut command).unwrap().wait();
    assert_eq!(status, ExitStatus::Code(0), "{argv:?}");
}
