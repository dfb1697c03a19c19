//! Who the machine is, in the files that say so. Does not decide it, and does not tell the kernel.

use std::fs::{self, File};
use std::net::IpAddr;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use agent_api::message::Identity;

use super::early::ensure_dir;
use crate::Error;

/// machine-id(5).
const MACHINE_ID: &str = "etc/machine-id";
const MACHINE_ID_DIGITS: usize = 32;

/// D-Bus's own, from before there was the other. Usually a link to it.
const DBUS_MACHINE_ID: &str = "var/lib/dbus/machine-id";

/// The longest host name (`__NEW_UTS_LEN`, linux/utsname.h).
const HOSTNAME_MAX: usize = 64;

/// Refuses what would make a file say something else than meant.
pub(crate) fn check(identity: &Identity) -> Result<(), Error> {
    let name = &identity.hostname;
    let usual = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
    if name.is_empty() || name.len() > HOSTNAME_MAX || !name.bytes().all(usual) {
        return Err(Error::Refused(format!(
            "{name:?} cannot be a host name: give at most {HOSTNAME_MAX} letters, digits, dots and hyphens"
        )));
    }
    check_machine_id(&identity.machine_id)
}

/// Refuses what is no machine id.
pub(crate) fn check_machine_id(id: &str) -> Result<(), Error> {
    let digits = id.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if id.len() != MACHINE_ID_DIGITS || !digits || id.bytes().all(|byte| byte == b'0') {
        return Err(Error::Refused(format!(
            "{id:?} cannot be a machine id: give {MACHINE_ID_DIGITS} lower-case hexadecimal digits that are not all zero"
        )));
    }
    Ok(())
}

/// Writes them all; `own` is the address that the machine's name stands for.
pub(crate) fn write(root: &Path, identity: &Identity, own: IpAddr) -> Result<(), Error> {
    let etc = root.join("etc");
    ensure_dir(&etc, 0o755)?;
    let old = read(&etc.join("hostname"));
    let hosts = renamed(&read(&etc.join("hosts")), own, old.trim(), &identity.hostname);
    put(&etc.join("hosts"), &hosts, 0o644)?;
    put(&etc.join("hostname"), &format!("{}\n", identity.hostname), 0o644)?;
    write_machine_id(root, &identity.machine_id)
}

/// Writes the machine id, where programs look for it.
pub(crate) fn write_machine_id(root: &Path, id: &str) -> Result<(), Error> {
    ensure_dir(root.join("etc"), 0o755)?;
    let id = format!("{id}\n");
    put(&root.join(MACHINE_ID), &id, 0o444)?;
    let dbus = root.join(DBUS_MACHINE_ID);
    if fs::symlink_metadata(&dbus).is_ok_and(|data| data.is_file()) {
        put(&dbus, &id, 0o444)?;
    }
    Ok(())
}

/// The machine id as the file says it, if it says one.
pub(crate) fn machine_id(root: &Path) -> Option<String> {
    let text = read(&root.join(MACHINE_ID));
    let id = text.trim();
    (id.len() == MACHINE_ID_DIGITS).then(|| id.to_owned())
}

/// `/etc/hosts` with the new name where the old one was; what else was written there stays.
fn renamed(hosts: &str, own: IpAddr, old: &str, new: &str) -> String {
    let own = own.to_string();
    let ours = |line: &str| {
        let mut words = line.split_whitespace();
        words.next() == Some(own.as_str()) && words.next() == Some(old) && words.next().is_none()
    };
    let mut text: String = hosts
        .lines()
        .filter(|line| !ours(line))
        .fold(String::new(), |text, line| text + line + "\n");
    text.push_str(&format!("{own}\t{new}\n"));
    text
}

/// The file's text; what cannot be read is written anew.
fn read(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A file that has the same length and mode is written over; one that has not is replaced, by another that is written beside it
/// first, so that nobody reads half of it. A link is replaced, not followed.
fn put(path: &Path, content: &str, mode: u32) -> Result<(), Error> {
    let fail = || Error::system(format!("writing {}", path.display()));
    let fits = |data: &fs::Metadata| {
        data.is_file()
            && data.nlink() == 1
            && data.len() == content.len() as u64
            && data.permissions().mode() & 0o7777 == mode
    };
    if fs::symlink_metadata(path).is_ok_and(|data| fits(&data)) {
        let mut options = File::options();
        // Who may not write to it may still replace it.
        if let Ok(file) = options.write(true).custom_flags(libc::O_NOFOLLOW).open(path) {
            return file.write_all_at(content.as_bytes(), 0).map_err(fail());
        }
    }
    let mut name = path.as_os_str().to_owned();
    name.push(".basalt-new");
    let beside = Path::new(&name);
    // One that an earlier attempt left, or somebody's link.
    if fs::symlink_metadata(beside).is_ok() {
        fs::remove_file(beside).map_err(fail())?;
    }
    fs::write(beside, content).map_err(fail())?;
    fs::set_permissions(beside, fs::Permissions::from_mode(mode)).map_err(fail())?;
    fs::rename(beside, path).map_err(fail())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    const OWN: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 1, 1));

    fn identity(hostname: &str, machine_id: &str) -> Identity {
        Identity {
            hostname: hostname.to_owned(),
            machine_id: machine_id.to_owned(),
        }
    }

    fn digits(digit: char) -> String {
        std::iter::repeat_n(digit, MACHINE_ID_DIGITS).collect()
    }

    fn dir(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("basalt-agent-{name}-{}", std::process::id()));
        fs::create_dir_all(path.join("etc")).unwrap();
        path
    }

    #[test]
    fn a_root_gets_its_names_and_keeps_the_rest() {
        let root = dir("names");
        let text = |name: &str| fs::read_to_string(root.join(name)).unwrap();
        fs::write(root.join("etc/hostname"), "old\n").unwrap();
        fs::write(
            root.join("etc/hosts"),
            "127.0.0.1\tlocalhost\n127.0.1.1\told\n192.0.2.9 old mine\n",
        )
        .unwrap();
        symlink("/nowhere", root.join("etc/machine-id")).unwrap();
        write(&root, &identity("one", &digits('a')), OWN).unwrap();
        assert_eq!(
            text("etc/hosts"),
            "127.0.0.1\tlocalhost\n192.0.2.9 old mine\n127.0.1.1\tone\n"
        );
        assert_eq!(
            (text("etc/hostname"), text("etc/machine-id")),
            ("one\n".into(), digits('a') + "\n")
        );
        assert_eq!(machine_id(&root), Some(digits('a')));
        assert!(!root.join("var").exists(), "a file for D-Bus was made");

        // A file of its own is written, a link leads to the other anyway.
        fs::create_dir_all(root.join("var/lib/dbus")).unwrap();
        fs::write(root.join(DBUS_MACHINE_ID), "old").unwrap();
        write(&root, &identity("two", &digits('b')), OWN).unwrap();
        assert_eq!(text(DBUS_MACHINE_ID), digits('b') + "\n");
        assert_eq!(
            text("etc/hosts"),
            "127.0.0.1\tlocalhost\n192.0.2.9 old mine\n127.0.1.1\ttwo\n"
        );
        fs::remove_file(root.join(DBUS_MACHINE_ID)).unwrap();
        symlink("/etc/machine-id", root.join(DBUS_MACHINE_ID)).unwrap();
        write(&root, &identity("three", &digits('c')), OWN).unwrap();
        assert!(fs::symlink_metadata(root.join(DBUS_MACHINE_ID)).unwrap().is_symlink());
        assert_eq!(
            fs::read_dir(root.join("etc")).unwrap().count(),
            3,
            "something was left beside"
        );
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn only_names_are_names() {
        check(&identity("web-1.example", &digits('0').replacen('0', "f", 1))).unwrap();
        for bad in ["", "a b", "a\nb", "ü", &"a".repeat(65)] {
            let error = check(&identity(bad, &digits('a'))).unwrap_err().to_string();
            assert!(error.contains("host name"), "{error}");
        }
        for bad in ["", "a", &digits('0'), &digits('A'), &digits('g'), &(digits('a') + "a")] {
            let error = check(&identity("a", bad)).unwrap_err().to_string();
            assert!(error.contains("machine id"), "{error}");
        }
    }

    #[test]
    fn a_root_without_a_machine_id_has_none() {
        let root = dir("no-names");
        assert_eq!(machine_id(&root), None);
        fs::write(root.join("etc/machine-id"), "uninitialized\n").unwrap();
        assert_eq!(machine_id(&root), None);
        fs::remove_dir_all(root).unwrap();
    }
}
