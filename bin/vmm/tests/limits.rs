//! What the process asks of its host before it is told anything. Needs no KVM.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Vmm(Child);

impl Drop for Vmm {
    fn drop(&mut self) {
        // Fails only when it has ended already.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Soft and hard limit of open files.
fn limits(pid: u32) -> (String, String) {
    let text = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = text.lines().find(|line| line.starts_with("Max open files")).unwrap();
    let mut words = line.split_whitespace().skip(3).map(str::to_owned);
    (words.next().unwrap(), words.next().unwrap())
}

fn wait_for(path: &Path) {
    let begun = Instant::now();
    while !path.exists() {
        assert!(
            begun.elapsed() < Duration::from_secs(90),
            "{} does not come",
            path.display()
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_soft_limit_of_open_files_is_raised_to_the_hard_one() {
    let directory = tempfile::tempdir().unwrap();
    let control = directory.path().join("control");
    let vmm = Command::new("sh")
        .args(["-c", r#"ulimit -n 512 && ulimit -Sn 64 && exec "$0" --control "$1""#])
        .arg(env!("CARGO_BIN_EXE_basalt-vmm"))
        .arg(&control)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let vmm = Vmm(vmm);
    wait_for(&control);
    assert_eq!(limits(vmm.0.id()), ("512".to_owned(), "512".to_owned()));
}

#[test]
fn nobody_else_drives_it() {
    let directory = tempfile::tempdir().unwrap();
    let control = directory.path().join("control");
    let vmm = Command::new("sh")
        .args(["-c", r#"umask 0 && exec "$0" --control "$1""#])
        .arg(env!("CARGO_BIN_EXE_basalt-vmm"))
        .arg(&control)
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let _vmm = Vmm(vmm);
    wait_for(&control);
    let mode = std::fs::metadata(&control).unwrap().permissions().mode();
    assert_eq!(mode & 0o077, 0, "{mode:o}");
}
