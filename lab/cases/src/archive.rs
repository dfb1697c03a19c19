//! Images for cases to import: `docker save` archives of one layer, made with the host's own tools.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

/// Makes an archive at `path` whose image has this name and these programs in its root directory, and nothing else.
pub(crate) fn make(path: &Path, name: &str, programs: &[(&str, &[u8])]) -> Result<()> {
    let directory = path.with_extension("d");
    let root = directory.join("root");
    fs::create_dir_all(&root)?;
    for (name, contents) in programs {
        fs::write(root.join(name), contents)?;
        fs::set_permissions(root.join(name), fs::Permissions::from_mode(0o755))?;
    }
    let script = "tar -C root -cf layer.tar . && d=$(sha256sum layer.tar | cut -d' ' -f1) && \
        printf '{\"architecture\":\"amd64\",\"os\":\"linux\",\"config\":{},\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[\"sha256:%s\"]}}' $d > config.json && \
        printf '[{\"Config\":\"config.json\",\"RepoTags\":[\"%s:latest\"],\"Layers\":[\"layer.tar\"]}]' \"$2\" > manifest.json && \
        tar -cf \"$1\" manifest.json config.json layer.tar";
    let status = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(path)
        .arg(name)
        .current_dir(&directory)
        .status()?;
    ensure!(status.success(), "the archive could not be made");
    Ok(fs::remove_dir_all(directory)?)
}
