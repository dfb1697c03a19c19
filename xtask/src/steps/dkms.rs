//! The Debian package of the kernel module: its source (`kmod/`), which DKMS builds for each kernel of the host, and
//! `packaging/dkms/`.
//!
//! Knows where DKMS wants things; which kernels the module is for stands in `packaging/dkms/dkms.conf`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use super::deb::{archive, changelog, check, compress, directory, empty_root, epoch, made, put, twice};
use crate::context::Context;
use crate::runner::{Report, Step, Task};
use crate::tree;

/// What the package is called.
const NAME: &str = "basalt-dkms";

/// What DKMS calls the module; source is in `/usr/src/MODULE-VERSION`.
const MODULE: &str = "basalt";

/// Where the module's source is, from the checkout's root.
const SOURCE: &str = "kmod";

/// Files of `packaging/dkms`, where each goes, and its mode. All know the version.
const FILES: &[(&str, &str, u32)] = &[
    ("dkms.conf", "usr/src/basalt-@VERSION@/dkms.conf", 0o644),
    ("copyright", "usr/share/doc/basalt-dkms/copyright", 0o644),
    ("postinst", "DEBIAN/postinst", 0o755),
    ("prerm", "DEBIAN/prerm", 0o755),
];

/// The package of this tree, as a file for others.
pub(crate) fn package(version: Option<String>) -> Step {
    Step::new("module-package", move |context, task| {
        let version = version.as_deref().unwrap_or(env!("CARGO_PKG_VERSION"));
        let file = directory(context).join(format!("{NAME}_{version}_all.deb"));
        make(context, task, version, &file)?;
        made(context, &file)
    })
    .hint("dpkg-deb's messages are above; it must be Debian's own")
}

/// The same twice, which must be equal.
pub(crate) fn package_for_tests() -> Step {
    Step::new("module-package", |context, task| {
        let version = env!("CARGO_PKG_VERSION");
        let file = directory(context).join(format!("{NAME}.deb"));
        twice(&file, |file| make(context, task, version, file))?;
        let mut wanted: Vec<_> = FILES
            .iter()
            .map(|(_, to, _)| to.replace("@VERSION@", version))
            .collect();
        wanted.extend(source(context, version)?.into_iter().map(|(_, to)| to));
        let wanted: Vec<_> = wanted.iter().map(String::as_str).collect();
        check(task, &file, &wanted)?;
        Ok(Report {
            detail: format!("{} kB, twice the same bytes", fs::metadata(&file)?.len() / 1000),
            ..Report::default()
        })
    })
    .check()
    .hint("`cargo xtask package --only module-package` makes the package alone")
}

/// Makes the package; the tree that it is made of stays beside it.
fn make(context: &Context, task: &mut Task, version: &str, file: &Path) -> Result<()> {
    let root = empty_root(context, "module-root")?;
    let epoch = epoch(context)?;
    for (from, to) in source(context, version)? {
        put(&root.join(to), &fs::read(context.root.join(from))?, 0o644)?;
    }
    let templates = context.root.join("packaging/dkms");
    for (name, to, mode) in FILES {
        let text = template(&templates.join(name), version)?;
        put(&root.join(to.replace("@VERSION@", version)), text.as_bytes(), *mode)?;
    }
    let control = fs::read_to_string(templates.join("control"))?;
    let changes = root.join("usr/share/doc").join(NAME).join("changelog");
    put(&changes, changelog(NAME, version, epoch, &control)?.as_bytes(), 0o644)?;
    compress(task, &[changes])?;
    archive(task, &root, (version, epoch), &control, file)
}

/// The module's files, from the checkout's root, and where each goes.
fn source(context: &Context, version: &str) -> Result<Vec<(PathBuf, String)>> {
    let mut files = tree::files(&context.root, Some(SOURCE))?;
    // What git alone reads.
    files.retain(|file| !file.contains("/."));
    let to = |file: &String| {
        let name = file
            .strip_prefix(SOURCE)
            .context("a file of the module's that is elsewhere")?;
        Ok((PathBuf::from(file), format!("usr/src/{MODULE}-{version}{name}")))
    };
    files.iter().map(to).collect()
}

/// A file of `packaging/dkms` for this version.
fn template(path: &Path, version: &str) -> Result<String> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text.replace("@VERSION@", version))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use super::*;

    fn packaging() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/dkms")
    }

    #[test]
    fn templates_exist_and_scripts_are_programs() {
        for (name, _, mode) in FILES {
            let path = packaging().join(name);
            let metadata = fs::metadata(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(metadata.permissions().mode() & 0o111 != 0, mode & 0o111 != 0, "{name}");
            let text = template(&path, "1.2").unwrap();
            assert!(!text.contains("@VERSION@"), "{name}: {text}");
        }
    }

    /// DKMS names the module as Kbuild does, and the scripts as DKMS does.
    #[test]
    fn all_mean_the_same_module() {
        let conf = template(&packaging().join("dkms.conf"), "1.2").unwrap();
        assert!(
            conf.contains("PACKAGE_NAME=\"basalt\"\nPACKAGE_VERSION=\"1.2\""),
            "{conf}"
        );
        assert!(conf.contains("BUILT_MODULE_NAME[0]=\"basalt\""), "{conf}");
        let kbuild = fs::read_to_string(packaging().join("../../kmod/Kbuild")).unwrap();
        assert!(kbuild.contains("obj-m := basalt.o"), "{kbuild}");
        let postinst = template(&packaging().join("postinst"), "1.2").unwrap();
        assert!(postinst.contains("common.postinst basalt 1.2 "), "{postinst}");
        let prerm = template(&packaging().join("prerm"), "1.2").unwrap();
        assert!(prerm.contains("dkms remove -m basalt -v 1.2 --all"), "{prerm}");
    }

    /// As DKMS asks bash: the series that it was tried on, and none that begins alike.
    #[test]
    fn it_is_for_kernels_that_it_was_tried_on() {
        let asks = "source \"$0\"; [[ $1 =~ $BUILD_EXCLUSIVE_KERNEL ]]";
        let is_for = |kernel: &str| {
            let mut bash = Command::new("bash");
            bash.args(["-c", asks]).arg(packaging().join("dkms.conf")).arg(kernel);
            bash.env("kernel_source_dir", "/nowhere").status().unwrap().success()
        };
        for kernel in ["6.1.0-56-cloud-amd64", "6.12.95+deb12-cloud-amd64", "6.12.0"] {
            assert!(is_for(kernel), "{kernel}");
        }
        for kernel in ["6.10.11-amd64", "6.13.1", "6.18.44", "16.1.0", "5.10.0-30-amd64"] {
            assert!(!is_for(kernel), "{kernel}");
        }
    }
}
