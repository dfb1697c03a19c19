//! Devices of the host's by names of the Container Device Interface: which PCI functions a name stands for, and what its specification wants
//! besides. A name stands for the functions behind the files of VFIO's that it wants; environment variables are for the command. What else a
//! container could have of the host a virtual machine cannot, and is refused by name. Claims nothing.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use base::{CdiName, PciAddress};
use cdi::{Broken, ContainerEdits, Found};
use node_api::Accelerator;
use vfio::host::nodes::VfioNode;

use super::{Devices, DevicesError};
use crate::Error;

/// What names stand for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resolved {
    /// The functions, each once.
    pub(crate) functions: Vec<PciAddress>,
    /// `NAME=value` for the command.
    pub(crate) env: Vec<String>,
}

/// Files that cannot be used, as they were when the log was told of them.
#[derive(Debug, Default)]
pub(super) struct ReportedFiles(Mutex<BTreeMap<PathBuf, Reported>>);

#[derive(Debug, PartialEq, Eq)]
struct Reported {
    why: String,
    version: Option<Version>,
}

/// Tells a file from what was written over it, or put in its place.
#[derive(Debug, PartialEq, Eq)]
struct Version {
    inode: u64,
    length: u64,
    modified: (i64, i64),
}

impl Version {
    /// Of one that can be looked at.
    fn of(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok()?;
        Some(Self {
            inode: found.ino(),
            length: found.len(),
            modified: (found.mtime(), found.mtime_nsec()),
        })
    }
}

impl ReportedFiles {
    /// Those of all files that cannot be used now that were not reported as they are; they are from here on.
    fn news<'b>(&self, broken: &'b [Broken]) -> Vec<&'b Broken> {
        let mut reported = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut before = std::mem::take(&mut *reported);
        let is_news = |broken: &&Broken| {
            let now = Reported {
                why: broken.why.clone(),
                version: Version::of(&broken.path),
            };
            let was_told = before.remove(&broken.path).is_some_and(|told| told == now);
            reported.insert(broken.path.clone(), now);
            !was_told
        };
        broken.iter().filter(is_news).collect()
    }
}

impl Devices {
    /// What names stand for now.
    pub(crate) fn resolve(&self, names: &[CdiName]) -> Result<Resolved, Error> {
        let mut resolved = Resolved::default();
        if names.is_empty() {
            return Ok(resolved);
        }
        let registry = self.outside.cdi.read();
        for name in names {
            if Accelerator::named(name).is_some() {
                return Err(Error::Invalid(format!(
                    "`{name}` is an accelerator by forwarded calls, which a sandbox has from its start on or not at all: say it with \
                     `basalt run --device`"
                )));
            }
            let found = registry.find(name).map_err(DevicesError::from)?;
            let refused = |why| DevicesError::Cdi {
                name: name.to_string(),
                path: found.path.display().to_string(),
                why,
            };
            let functions = self.functions_of(found).map_err(refused)?;
            if functions.is_empty() {
                let why = "names no file of VFIO's (/dev/vfio/GROUP), so that no PCI function is meant".to_owned();
                return Err(refused(why).into());
            }
            for function in functions {
                if !resolved.functions.contains(&function) {
                    resolved.functions.push(function);
                }
            }
            for entry in &found.edits.env {
                if !resolved.env.contains(entry) {
                    resolved.env.push(entry.clone());
                }
            }
        }
        Ok(resolved)
    }

    /// The names of functions, as far as there are any. Files that are wrong are told by the log, each once until it changes.
    pub(crate) fn cdi_names(&self) -> BTreeMap<PciAddress, Vec<CdiName>> {
        let registry = self.outside.cdi.read();
        for broken in self.reported.news(registry.broken()) {
            log::warn!(
                "the specification {} of the Container Device Interface cannot be used: {}",
                broken.path.display(),
                broken.why
            );
        }
        let mut names: BTreeMap<PciAddress, Vec<CdiName>> = BTreeMap::new();
        for (name, found) in registry.all() {
            // Most are of devices that are none for virtual machines.
            for function in self.functions_of(found).unwrap_or_default() {
                names.entry(function).or_default().push(name.clone());
            }
        }
        names
    }

    /// The functions behind all that it wants, in the order in which it wants them.
    fn functions_of(&self, found: &Found) -> Result<Vec<PciAddress>, String> {
        let meaningless = without_meaning(&found.edits);
        if !meaningless.is_empty() {
            return Err(format!(
                "wants what a virtual machine cannot have of the host: {}; write a specification with the files of VFIO's alone (`basalt \
                 device cdi` prints one)",
                meaningless.join(", ")
            ));
        }
        let mut functions = Vec::new();
        for node in found
            .edits
            .device_nodes
            .iter()
            .filter_map(|node| VfioNode::of(node.on_host()))
        {
            let given = node.functions(self.sysfs()).map_err(|error| {
                let error = crate::error::words::with_causes(&error);
                format!("stands for nothing: {error}")
            })?;
            functions.extend(given);
        }
        Ok(functions)
    }
}

/// What is of the host's kernel, which a guest does not share.
fn without_meaning(edits: &ContainerEdits) -> Vec<String> {
    let mut told = Vec::new();
    let others = edits.device_nodes.iter().map(cdi::DeviceNode::on_host);
    told.extend(
        others
            .filter(|path| VfioNode::of(path).is_none())
            .map(|path| format!("the device file {path}")),
    );
    told.extend(
        edits
            .mounts
            .iter()
            .map(|mount| format!("the mount of {}", mount.host_path)),
    );
    told.extend(
        edits
            .hooks
            .iter()
            .map(|hook| format!("the hook {} ({})", hook.hook_name, hook.path)),
    );
    told.extend(
        edits
            .net_devices
            .iter()
            .map(|device| format!("the interface {}", device.host_interface_name)),
    );
    told.extend(edits.intel_rdt.iter().map(|_| "intelRdt".to_owned()));
    told.extend(
        edits
            .additional_gids
            .iter()
            .filter(|gid| **gid != 0)
            .map(|gid| format!("the group {gid}")),
    );
    told
}

#[cfg(test)]
mod tests {
    use super::*;
    use ::cdi::Directories;

    #[test]
    fn a_file_that_is_wrong_is_reported_once_until_it_changes() {
        let directory = tempfile::tempdir().unwrap();
        let directories = Directories::of(vec![directory.path().to_owned()]);
        let (reported, file) = (ReportedFiles::default(), directory.path().join("vendor.json"));
        let news = || {
            let registry = directories.read();
            let news = reported.news(registry.broken());
            let names = news.iter().filter_map(|broken| broken.path.file_name()?.to_str());
            names.map(str::to_owned).collect::<Vec<_>>()
        };
        assert!(news().is_empty());
        fs::write(&file, "{").unwrap();
        assert_eq!(news(), ["vendor.json"]);
        assert!(news().is_empty());
        let other = directory.path().join("other.yaml");
        fs::write(&other, "kind: [").unwrap();
        assert_eq!(news(), ["other.yaml"]);
        // Of the same length, and wrong for the same reason.
        fs::remove_file(&file).unwrap();
        fs::write(directory.path().join("between"), "").unwrap();
        fs::write(&file, "{").unwrap();
        assert_eq!(news(), ["vendor.json"]);
        assert!(news().is_empty());
        // One that was mended is new when it is wrong again.
        fs::remove_file(&other).unwrap();
        assert!(news().is_empty());
        fs::write(&other, "kind: [").unwrap();
        assert_eq!(news(), ["other.yaml"]);
    }
}
