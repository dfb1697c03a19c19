//! An image to import: as small as one can be.

use std::fs;
use std::path::Path;

use serde_json::json;
use sha2::{Digest, Sha256};

/// The digest of `bytes` in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The one layer: an archive without entries.
pub(crate) const LAYER: [u8; 1024] = [0; 1024];

/// Writes a layout as the OCI image specification has it, with one layer and this configuration.
pub(crate) fn write_layout(layout: &Path, config: &serde_json::Value) {
    let blobs = layout.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let blob = |media_type: &str, bytes: &[u8]| {
        let digest = sha256(bytes);
        fs::write(blobs.join(&digest), bytes).unwrap();
        json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len() })
    };
    let layer = blob("application/vnd.oci.image.layer.v1.tar", &LAYER);
    let config = json!({
        "architecture": "amd64", "os": "linux", "created": "2026-01-02T03:04:05Z", "config": config,
        "rootfs": { "type": "layers", "diff_ids": [layer["digest"]] }
    });
    let config = blob(
        "application/vnd.oci.image.config.v1+json",
        config.to_string().as_bytes(),
    );
    let manifest = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "config": config, "layers": [layer]
    });
    let manifest = blob(
        "application/vnd.oci.image.manifest.v1+json",
        manifest.to_string().as_bytes(),
    );
    fs::write(
        layout.join("oci-layout"),
        json!({ "imageLayoutVersion": "1.0.0" }).to_string(),
    )
    .unwrap();
    fs::write(
        layout.join("index.json"),
        json!({ "schemaVersion": 2, "manifests": [manifest] }).to_string(),
    )
    .unwrap();
}
