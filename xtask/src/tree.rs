//! The checkout's files: what git tracks or would track.
//!
//! Knows nothing of their contents. Without git (a source archive, or no such program) everything but `target`
//! and `.git` counts.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, bail};

/// Paths from the root, sorted, below `dir` if given. Files that git lists but that are gone are left out.
pub(crate) fn files(root: &Path, dir: Option<&str>) -> Result<Vec<String>> {
    let mut files = if root.join(".git").exists() {
        listed(root, dir)?
    } else {
        walked(root, dir)?
    };
    files.retain(|file| root.join(file).symlink_metadata().is_ok_and(|meta| !meta.is_dir()));
    files.sort();
    files.dedup();
    Ok(files)
}

fn listed(root: &Path, dir: Option<&str>) -> Result<Vec<String>> {
    let mut git = Command::new("git");
    // In CI the checkout may belong to another user than the one who runs this; listing files is harmless then.
    git.arg("-c")
        .arg(format!("safe.directory={}", root.display()))
        .current_dir(root);
    git.args(["ls-files", "--cached", "--others", "--exclude-standard", "-z", "--"])
        .args(dir);
    let output = match git.output() {
        Err(error) if error.kind() == ErrorKind::NotFound => return walked(root, dir),
        output => output?,
    };
    if !output.status.success() {
        bail!(
            "git ls-files failed: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text
        .split('\0')
        .filter(|name| !name.is_empty())
        .map(str::to_owned)
        .collect())
}

fn walked(root: &Path, dir: Option<&str>) -> Result<Vec<String>> {
    let mut files = Vec::new();
    let mut open = vec![dir.map_or_else(|| root.to_owned(), |dir| root.join(dir))];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir)? {
            let path = entry?.path();
            if path.symlink_metadata()?.is_dir() {
                if path != root.join("target") && path != root.join(".git") {
                    open.push(path);
                }
            } else {
                files.push(path.strip_prefix(root)?.to_string_lossy().into_owned());
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_is_not_part_of_the_tree() {
        let dir = tempfile::tempdir().unwrap();
        for file in ["a/b", "target/c", ".git/x", "d"] {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        assert_eq!(walked(dir.path(), None).unwrap().len(), 2);
        fs::remove_dir_all(dir.path().join(".git")).unwrap();
        assert_eq!(files(dir.path(), None).unwrap(), ["a/b", "d"]);
        assert_eq!(files(dir.path(), Some("a")).unwrap(), ["a/b"]);
    }
}
