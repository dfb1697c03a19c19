//! Remembers the verdict about KVM until the next boot, so that `basalt run` does not run a trial guest each time.
//!
//! The memory is a convenience: where no directory can be written, the trial is simply made again. Knows nothing of
//! how a verdict is found.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;

use crate::kvm::Verdict;

/// The verdict of this boot under this program version, where one was remembered.
pub(crate) fn remembered() -> Option<Verdict> {
    let text = fs::read_to_string(file()?).ok()?;
    parse(&text, &boot_id()?)
}

/// Keeps `verdict` for this boot.
pub(crate) fn remember(verdict: &Verdict) {
    let (Some(file), Some(boot)) = (file(), boot_id()) else {
        return;
    };
    let text = match verdict {
        Verdict::Kvm => format!("{boot}\nkvm\n"),
        Verdict::Lab(reason) => format!("{boot}\nlab {}\n", reason.replace('\n', " ")),
    };
    let partial = file.with_extension(format!("{}", std::process::id()));
    let kept = fs::write(&partial, text).and_then(|()| fs::rename(&partial, &file));
    if kept.is_err() {
        // Nothing is lost but milliseconds; a half-written file must not stay.
        fs::remove_file(&partial).unwrap_or_default();
    }
}

fn parse(text: &str, boot: &str) -> Option<Verdict> {
    let mut lines = text.lines();
    if lines.next()? != boot {
        return None;
    }
    match lines.next()? {
        "kvm" => Some(Verdict::Kvm),
        line => line.strip_prefix("lab ").map(|reason| Verdict::Lab(reason.to_owned())),
    }
}

fn boot_id() -> Option<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(format!("{} {}", id.trim(), env!("CARGO_PKG_VERSION")))
}

/// The file, in a directory that only this user can write to: a verdict that somebody else planted is not believed.
fn file() -> Option<PathBuf> {
    let uid = rustix::process::getuid();
    let directory = if uid.is_root() {
        PathBuf::from("/run/basalt")
    } else {
        PathBuf::from(std::env::var_os("XDG_RUNTIME_DIR")?).join("basalt")
    };
    match fs::DirBuilder::new().mode(0o700).create(&directory) {
        Ok(()) => (),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => (),
        Err(_) => return None,
    }
    let metadata = fs::symlink_metadata(&directory).ok()?;
    let ours = metadata.is_dir() && metadata.uid() == uid.as_raw() && metadata.mode() & 0o022 == 0;
    ours.then(|| directory.join("kvm-verdict"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_boot_forgets() {
        assert_eq!(parse("a 1\nkvm\n", "a 1"), Some(Verdict::Kvm));
        assert_eq!(parse("a 1\nkvm\n", "b 1"), None);
        assert_eq!(parse("a 1\nlab no vmx\n", "a 1"), Some(Verdict::Lab("no vmx".into())));
        assert_eq!(parse("a 1\n", "a 1"), None);
        assert_eq!(parse("a 1\nkv", "a 1"), None);
        assert_eq!(parse("", "a 1"), None);
    }
}
