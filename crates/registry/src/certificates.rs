//! Whom a registry's certificate may be from: the authorities of this machine, and those that were put beside it for one
//! registry, in the places where docker and podman look.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use ureq::tls::{Certificate, PemItem, parse_pem};

use crate::Error;

/// Where Debian, Fedora, SUSE and Alpine keep all authorities in one file.
const SYSTEM: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// The authorities of this machine, or those of the file that `SSL_CERT_FILE` names.
///
/// # Errors
/// A file of them cannot be used.
pub fn machine_authorities() -> Result<Vec<Certificate<'static>>, Error> {
    let chosen = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    match chosen.or_else(|| SYSTEM.iter().map(PathBuf::from).find(|path| path.exists())) {
        Some(path) => read(&path),
        None => Ok(Vec::new()),
    }
}

/// Authorities for `host`: the system's, and each `*.crt` in `DIRECTORY/HOST/` of `directories` and in those of `others`.
pub(crate) fn authorities(
    host: &str,
    directories: &[PathBuf],
    others: &[PathBuf],
) -> Result<Vec<Certificate<'static>>, Error> {
    let mut found = machine_authorities()?;
    let own = directories.iter().map(|directory| directory.join(host));
    for directory in own.chain(others.iter().cloned()) {
        found.extend(in_directory(&directory)?);
    }
    Ok(found)
}

fn in_directory(directory: &Path) -> Result<Vec<Certificate<'static>>, Error> {
    let entries = match fs::read_dir(directory) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(Vec::new()),
        entries => entries.map_err(|error| unusable(directory, &error))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| unusable(directory, &error))?.path();
        if path.extension().is_some_and(|kind| kind == "crt") {
            found.extend(read(&path)?);
        }
    }
    Ok(found)
}

fn read(path: &Path) -> Result<Vec<Certificate<'static>>, Error> {
    let text = fs::read(path).map_err(|error| unusable(path, &error))?;
    let mut found = Vec::new();
    for item in parse_pem(&text) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| unusable(path, &error))? {
            found.push(certificate);
        }
    }
    if found.is_empty() {
        return Err(unusable(path, &"there is no certificate in it"));
    }
    Ok(found)
}

fn unusable(path: &Path, problem: &dyn std::fmt::Display) -> Error {
    Error::BadCertificates {
        path: path.to_owned(),
        problem: problem.to_string(),
    }
}
