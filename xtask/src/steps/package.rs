//! The Debian package: a tree of the finished programs, what the CLI writes of itself, and `packaging/`.
//!
//! Knows where files go on a Debian system; what units and maintainer scripts do is theirs to know, and how a tree becomes a
//! package is in `deb`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::KERNEL;
use super::deb::{
    LIMIT, archive, captured, changelog, check, compress, directory, empty_root, epoch, files_below, made, put, twice,
};
use super::licences;
use super::sandbox::basalt;
use crate::context::Context;
use crate::runner::{Report, Step, Task};

/// What the package is called.
const NAME: &str = "basalt";

/// Debian's names of the two ends of an upgrade in the lab's case `package` (`lab/cases/src/cases/package.rs`).
const TEST_PACKAGES: [&str; 2] = ["old.deb", "new.deb"];

/// The second one's version.
const NEXT: &str = concat!(env!("CARGO_PKG_VERSION"), "+next");

/// A file, where it goes, and its mode. The first word says where it comes from: the programs, the assets, or the checkout.
const FILES: &[(Origin, &str, &str, u32)] = &[
    (Origin::Programs, "basalt", "usr/bin/basalt", 0o755),
    (Origin::Programs, "basaltd", "usr/sbin/basaltd", 0o755),
    (Origin::Programs, "basalt-gateway", "usr/sbin/basalt-gateway", 0o755),
    (Origin::Assets, "basalt-vmm", "usr/lib/basalt/basalt-vmm", 0o755),
    (
        Origin::Assets,
        "basalt-accel-server",
        "usr/lib/basalt/basalt-accel-server",
        0o755,
    ),
    (
        Origin::Assets,
        "libbasalt_opencl.so",
        "usr/lib/basalt/libbasalt_opencl.so",
        0o644,
    ),
    (
        Origin::Assets,
        "libbasalt_opencl-musl.so",
        "usr/lib/basalt/libbasalt_opencl-musl.so",
        0o644,
    ),
    (
        Origin::Assets,
        "libbasalt_cuda.so",
        "usr/lib/basalt/libbasalt_cuda.so",
        0o644,
    ),
    (Origin::Assets, "vmlinux", "usr/lib/basalt/vmlinux", 0o644),
    (Origin::Assets, "initramfs.cpio", "usr/lib/basalt/initramfs.cpio", 0o644),
    (
        Origin::Tree,
        "packaging/systemd/basaltd.service",
        "lib/systemd/system/basaltd.service",
        0o644,
    ),
    (
        Origin::Tree,
        "packaging/systemd/basaltd.socket",
        "lib/systemd/system/basaltd.socket",
        0o644,
    ),
    (
        Origin::Tree,
        "packaging/systemd/basalt-sandboxes.service",
        "lib/systemd/system/basalt-sandboxes.service",
        0o644,
    ),
    (
        Origin::Tree,
        "packaging/systemd/basalt-gateway.service",
        "lib/systemd/system/basalt-gateway.service",
        0o644,
    ),
    (
        Origin::Tree,
        "packaging/debian/basalt-gateway.8",
        "usr/share/man/man8/basalt-gateway.8",
        0o644,
    ),
    (
        Origin::Tree,
        "packaging/debian/basaltd.8",
        "usr/share/man/man8/basaltd.8",
        0o644,
    ),
    (
        Origin::Tree,
        "packaging/debian/lintian-overrides",
        "usr/share/lintian/overrides/basalt",
        0o644,
    ),
    (Origin::Tree, "packaging/debian/postinst", "DEBIAN/postinst", 0o755),
    (Origin::Tree, "packaging/debian/prerm", "DEBIAN/prerm", 0o755),
    (Origin::Tree, "packaging/debian/postrm", "DEBIAN/postrm", 0o755),
];

/// The shells that `basalt completion` knows, and where each looks.
const COMPLETIONS: &[(&str, &str)] = &[
    ("bash", "usr/share/bash-completion/completions/basalt"),
    ("zsh", "usr/share/zsh/vendor-completions/_basalt"),
    ("fish", "usr/share/fish/vendor_completions.d/basalt.fish"),
];

#[derive(Clone, Copy)]
enum Origin {
    Programs,
    Assets,
    Tree,
}

/// The package of this tree, as a file for others.
pub(crate) fn package(version: Option<String>) -> Step {
    Step::new("package", move |context, task| {
        let version = version.as_deref().unwrap_or(env!("CARGO_PKG_VERSION"));
        let file = directory(context).join(format!("{NAME}_{version}_amd64.deb"));
        make(context, task, version, &file)?;
        made(context, &file)
    })
    .hint("dpkg-deb's messages are above; it must be Debian's own")
}

/// The same twice, which must be equal, and a next version for the lab's case.
pub(crate) fn packages_for_tests() -> Step {
    Step::new("package", |context, task| {
        let [old, new] = for_tests(context);
        fs::create_dir_all(old.parent().context("a package without a directory")?)?;
        twice(&old, |file| make(context, task, env!("CARGO_PKG_VERSION"), file))?;
        make(context, task, NEXT, &new)?;
        let wanted: Vec<_> = FILES.iter().map(|(_, _, to, _)| *to).collect();
        check(task, &old, &wanted)?;
        Ok(Report {
            detail: format!("{} kB, twice the same bytes", fs::metadata(&old)?.len() / 1000),
            ..Report::default()
        })
    })
    .check()
    .hint("`cargo xtask package` makes the package alone")
}

/// Where they are.
pub(crate) fn for_tests(context: &Context) -> [PathBuf; 2] {
    TEST_PACKAGES.map(|name| context.release().join("basalt-packages").join(name))
}

/// Makes the package; the tree that it is made of stays beside it.
fn make(context: &Context, task: &mut Task, version: &str, file: &Path) -> Result<()> {
    let root = empty_root(context, "root")?;
    let epoch = epoch(context)?;
    let control = fs::read_to_string(context.root.join("packaging/debian/control"))?;
    for (from, name, to, mode) in FILES {
        let base = match from {
            Origin::Programs => context.release(),
            Origin::Assets => context.assets(),
            Origin::Tree => context.root.clone(),
        };
        let bytes = fs::read(base.join(name)).with_context(|| format!("cannot read {}", base.join(name).display()))?;
        put(&root.join(to), &bytes, *mode)?;
    }
    // Policy 10.1: without symbols.
    let programs = FILES
        .iter()
        .filter(|(_, name, _, mode)| *mode == 0o755 || name.ends_with(".so"))
        .map(|(_, _, to, _)| root.join(to));
    let mut strip = Command::new("strip");
    strip
        .arg("--strip-unneeded")
        .args(programs.filter(|path| !path.starts_with(root.join("DEBIAN"))));
    task.run_within(&mut strip, LIMIT)?;
    describe(context, task, &root)?;
    let documents = root.join("usr/share/doc").join(NAME);
    let changes = changelog(NAME, version, epoch, &control)?;
    put(&documents.join("changelog"), changes.as_bytes(), 0o644)?;
    licensing(context, &documents)?;
    let mut long = vec![documents.join("changelog"), documents.join("third-party")];
    files_below(&root.join("usr/share/man"), &mut long)?;
    compress(task, &long)?;
    archive(task, &root, (version, epoch), &control, file)
}

/// Completions and man pages, from the CLI's own definition.
fn describe(context: &Context, task: &mut Task, root: &Path) -> Result<()> {
    for (shell, to) in COMPLETIONS {
        let script = captured(&mut basalt(context, &["completion", shell]))?;
        put(&root.join(to), &script, 0o644)?;
    }
    let written = directory(context).join("man");
    if written.exists() {
        fs::remove_dir_all(&written)?;
    }
    let path = written.to_str().context("the checkout's path is no text")?;
    task.run_within(&mut basalt(context, &["man", path]), LIMIT)?;
    for entry in fs::read_dir(&written)? {
        let entry = entry?;
        let to = root.join("usr/share/man/man1").join(entry.file_name());
        put(&to, &fs::read(entry.path())?, 0o644)?;
    }
    Ok(())
}

/// The package's own and others' licences.
fn licensing(context: &Context, documents: &Path) -> Result<()> {
    let facts = fs::read_to_string(KERNEL.path(context)?.join("facts"))?;
    let kernel = facts.lines().find_map(|line| line.strip_prefix("source "));
    let kernel = kernel.context("the kernel's facts name no source package")?;
    let copyright = fs::read_to_string(context.root.join("packaging/debian/copyright"))?.replace("@KERNEL@", kernel);
    put(&documents.join("copyright"), copyright.as_bytes(), 0o644)?;
    let others = licences::text(
        context,
        &["basalt", "basaltd", "basalt-gateway-bin", "basalt-vmm", "basalt-agent"],
    )?;
    put(&documents.join("third-party"), others.as_bytes(), 0o644)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn files_of_the_tree_exist_and_scripts_are_programs() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for (from, name, _, mode) in FILES {
            if matches!(from, Origin::Tree) {
                let metadata = fs::metadata(root.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
                assert_eq!(metadata.permissions().mode() & 0o111 != 0, mode & 0o111 != 0, "{name}");
            }
        }
    }

    /// The devices of modules have numbers only when these are loaded, and the unit's devices are told by number.
    #[test]
    fn modules_are_loaded_before_the_daemon_may_have_their_devices() {
        let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd/basaltd.service");
        let text = fs::read_to_string(unit).unwrap();
        let has = |line: &str, word: &str| {
            let found = text.lines().find(|text| text.starts_with(line) && text.contains(word));
            assert!(found.is_some(), "no {line} with {word}");
        };
        has("Wants=", "modprobe@basalt.service");
        has("After=", "modprobe@basalt.service");
        has("DeviceAllow=", "/dev/basalt rw");
        has("Wants=", "modprobe@vfio_pci.service");
        has("After=", "modprobe@vfio_pci.service");
        has("DeviceAllow=", "/dev/vfio/vfio rw");
        has("DeviceAllow=", "char-vfio* rw");
    }

    /// The daemon lets the gateway ask at the socket that the gateway asks at, and the package makes the group.
    #[test]
    fn units_agree_on_the_gateways_socket() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging");
        let read = |name: &str| fs::read_to_string(root.join(name)).unwrap();
        let (daemon, gateway) = (read("systemd/basaltd.service"), read("systemd/basalt-gateway.service"));
        let socket = "/run/basalt-gateway/basaltd.sock";
        assert!(daemon.contains(&format!("--gateway-socket {socket} --gateway-group basalt-gateway\n")));
        assert!(daemon.contains("\nRuntimeDirectory=basalt-gateway\n"));
        assert!(gateway.contains(&format!("--node-socket {socket} ")) && gateway.contains("\nUser=basalt-gateway\n"));
        assert!(read("debian/postinst").contains("groupadd --system basalt-gateway\n"));
        let purge = read("debian/postrm");
        for directory in ["/var/lib/basalt-gateway", "/var/cache/basalt-gateway"] {
            assert!(gateway.contains(directory) && purge.contains(directory), "{directory}");
        }
        // What `basalt-gateway env` writes for root.
        assert!(purge.contains("/var/cache/basalt-env"));
    }

    /// The units and the maintainer scripts name the same things.
    #[test]
    fn units_agree_on_the_cgroup() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
        let read = |name: &str| fs::read_to_string(root.join(name)).unwrap();
        let cgroup = "--cgroup /system.slice/basalt-sandboxes.service";
        assert!(read("basaltd.service").contains(cgroup) && read("basalt-sandboxes.service").contains(cgroup));
        // A mount namespace of its own would hide the node's network namespace from everybody else.
        for unit in ["basaltd.service", "basalt-sandboxes.service"] {
            for forbidden in [
                "\nProtect",
                "\nPrivate",
                "\nReadOnly",
                "\nInaccessible",
                "\nSystemCall",
                "\nRestrict",
            ] {
                let text = read(unit).replace("\nRestart", "\n");
                assert!(!text.contains(forbidden), "{unit} has {}", forbidden.trim());
            }
        }
    }
}
