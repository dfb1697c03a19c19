//! What sysfs says of PCI functions: their group, their drivers. Knows no descriptor of VFIO's.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::VfioError;

const DEVICES: &str = "/sys/bus/pci/devices";

/// Drivers beside which a group can be given away: those of VFIO, one that does nothing, and that of ports, which do no DMA of their own.
const HARMLESS: [&str; 3] = ["vfio-pci", "pci-stub", "pcieport"];

/// The PCI functions of this host.
#[derive(Clone, Debug)]
pub(crate) struct Sysfs(PathBuf);

impl Default for Sysfs {
    fn default() -> Self {
        Self(DEVICES.into())
    }
}

impl Sysfs {
    /// The number of a function's group.
    ///
    /// # Errors
    /// The name is none, there is no such function, or it is behind no IOMMU.
    pub(crate) fn group(&self, name: &str) -> Result<String, VfioError> {
        let directory = self.directory(name)?;
        fs::metadata(&directory).map_err(|error| at(&directory, error))?;
        link(&directory.join("iommu_group"))?.ok_or_else(|| VfioError::NoIommu(name.to_owned()))
    }

    /// Checks that a function is vfio-pci's, or that of a driver which is vfio-pci and more (such as `mlx5_vfio_pci`).
    ///
    /// # Errors
    /// It is another driver's, or nobody's.
    pub(crate) fn check_driver(&self, name: &str) -> Result<(), VfioError> {
        match link(&self.directory(name)?.join("driver"))? {
            Some(driver) if is_vfio(&driver) => Ok(()),
            other => Err(VfioError::OtherDriver {
                function: name.to_owned(),
                driver: other.unwrap_or_else(|| "nobody".into()),
            }),
        }
    }

    /// The functions of a function's group that the host uses, each with its driver.
    ///
    /// # Errors
    /// The host does not tell.
    pub(crate) fn used(&self, name: &str) -> Result<Vec<(String, String)>, VfioError> {
        let directory = self.directory(name)?.join("iommu_group/devices");
        let mut used = Vec::new();
        for entry in fs::read_dir(&directory).map_err(|error| at(&directory, error))? {
            let entry = entry.map_err(|error| at(&directory, error))?;
            if let Some(driver) = link(&entry.path().join("driver"))?
                && !is_vfio(&driver)
                && !HARMLESS.contains(&driver.as_str())
            {
                used.push((entry.file_name().to_string_lossy().into_owned(), driver));
            }
        }
        used.sort();
        Ok(used)
    }

    fn directory(&self, name: &str) -> Result<PathBuf, VfioError> {
        let is_name = |byte: u8| byte.is_ascii_hexdigit() || b":.".contains(&byte);
        // A name that is none would lead elsewhere.
        match name.bytes().all(is_name) && !name.contains("..") && name.contains(':') {
            true => Ok(self.0.join(name)),
            false => Err(VfioError::Other("a PCI function's name is like 0000:00:04.0")),
        }
    }
}

fn is_vfio(driver: &str) -> bool {
    driver == "vfio-pci" || driver.ends_with("_vfio_pci") || driver.ends_with("-vfio-pci")
}

pub(crate) fn at(path: &Path, source: io::Error) -> VfioError {
    VfioError::File {
        path: path.display().to_string(),
        source,
    }
}

/// The last part of a link's destination.
fn link(path: &Path) -> Result<Option<String>, VfioError> {
    match fs::read_link(path) {
        Ok(to) => Ok(to.file_name().map(|name| name.to_string_lossy().into_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(at(path, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A host with these functions, each with its driver, all in group 6.
    fn host(functions: &[(&str, &str)]) -> (tempfile::TempDir, Sysfs) {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("groups/6/devices");
        fs::create_dir_all(&group).unwrap();
        for (name, driver) in functions {
            let directory = root.path().join(name);
            fs::create_dir(&directory).unwrap();
            symlink(root.path().join("groups/6"), directory.join("iommu_group")).unwrap();
            symlink(&directory, group.join(name)).unwrap();
            if !driver.is_empty() {
                symlink(root.path().join("drivers").join(driver), directory.join("driver")).unwrap();
            }
        }
        let sysfs = Sysfs(root.path().to_owned());
        (root, sysfs)
    }

    #[test]
    fn functions_of_a_group_that_the_host_uses_are_named() {
        let (_root, sysfs) = host(&[
            ("0000:00:1f.0", "lpc_ich"),
            ("0000:00:1f.2", "vfio-pci"),
            ("0000:00:1f.3", "i801_smbus"),
            ("0000:00:1f.4", ""),
            ("0000:00:1f.5", "pcieport"),
            ("0000:00:1f.6", "mlx5_vfio_pci"),
        ]);
        assert_eq!(sysfs.group("0000:00:1f.2").unwrap(), "6");
        let used = sysfs.used("0000:00:1f.2").unwrap();
        let used: Vec<_> = used
            .iter()
            .map(|(name, driver)| (&name[11..], driver.as_str()))
            .collect();
        assert_eq!(used, [("0", "lpc_ich"), ("3", "i801_smbus")]);
    }

    #[test]
    fn drivers_are_told_apart() {
        let (_root, sysfs) = host(&[
            ("0000:01:00.0", "nvme"),
            ("0000:01:00.1", ""),
            ("0000:01:00.2", "vfio-pci"),
        ]);
        sysfs.check_driver("0000:01:00.2").unwrap();
        let told = |name| sysfs.check_driver(name).unwrap_err().to_string();
        assert!(told("0000:01:00.0").contains("0000:01:00.0 is nvme's"));
        assert!(told("0000:01:00.1").contains("is nobody's"));
    }

    #[test]
    fn names_lead_nowhere_else() {
        let sysfs = Sysfs::default();
        for name in ["../../../etc", "0000:00:04.0/..", "nvme0", "..", "00:..", ""] {
            assert!(matches!(sysfs.group(name), Err(VfioError::Other(_))), "{name}");
        }
        let error = sysfs.group("ffff:ff:1f.7").unwrap_err().to_string();
        assert!(error.contains("/sys/bus/pci/devices/ffff:ff:1f.7"), "{error}");
    }

    #[test]
    fn a_function_without_a_group_is_behind_no_iommu() {
        let (root, sysfs) = host(&[("0000:01:00.0", "vfio-pci")]);
        fs::remove_file(root.path().join("0000:01:00.0/iommu_group")).unwrap();
        assert!(matches!(sysfs.group("0000:01:00.0"), Err(VfioError::NoIommu(_))));
    }
}
