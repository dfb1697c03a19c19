//! virtio-fs (5.11): a directory of the host, served by threads of this device, or by somebody at the end of a stream. Knows no transport and no machine, and of
//! FUSE only that requests have replies.
//!
//! ```text
//!  hiprio, request queues ─take─▶ chain ─copy─▶ request ─▶ fuse::Server ─▶ reply ─copy─▶ chain ─use─▶
//! ```
//! One worker a queue. Requests and replies are copied: the server works on memory that the guest cannot change under it,
//! and all that goes into guest memory goes through the chain's checked slices, which keep account of it. Sections cited
//! are those of virtio 1.2.
//!
//! A device can be dormant, without a directory. Until a guest mounts one it sends no request (5.11.6), so that a device
//! which nobody has asked anything can be saved, and be restored with whatever directory there is then.

mod device;
mod worker;

use std::fs::File;
use std::sync::Arc;

use ::device::{CreateError, DeviceContext, DeviceModule, FdTable, parse_config};
use fuse::stream::Remote;
use fuse::{Answer, Options, Owners, Server};
use observe::{Counter, LogLimit};
use virtio::VirtioDevice;
use vmm_api::DeviceSpec;
use vmm_api::devices::{DeviceConfig, FsConfig, FsDirectory, FsOwners, FsSource};

use crate::device::Fs;

/// The length of a tag (5.11.4).
const TAG: usize = 36;

/// The least and the most files that a guest may know of.
const LEAST_FILES: u32 = 16;
const MOST_FILES: u32 = 1 << 20;

/// This kind of device.
pub static MODULE: FsModule = FsModule;

/// Makes virtio-fs devices.
#[derive(Debug)]
pub struct FsModule;

/// What a device counts.
#[derive(Clone)]
pub(crate) struct Metrics {
    requests: Counter,
    to_guest: Counter,
    from_guest: Counter,
    refused: Counter,
}

impl DeviceModule for FsModule {
    fn kind(&self) -> &'static str {
        FsConfig::KIND
    }

    fn create(
        &self,
        spec: &DeviceSpec,
        fds: &mut FdTable,
        context: &DeviceContext<'_>,
    ) -> Result<Box<dyn VirtioDevice>, CreateError> {
        let config: FsConfig = parse_config(spec)?;
        let tag = tag(&config.tag)?;
        let source: Option<Arc<dyn Answer>> = match &config.source {
            Some(FsSource::Directory(directory)) => Some(Arc::new(serve(directory, fds)?)),
            Some(FsSource::Stream(socket)) => Some(Arc::new(Remote::new(File::from(fds.take(*socket)?)))),
            None => None,
        };
        let bytes = |direction| {
            let labels = [("device", context.id), ("direction", direction)];
            context.metrics.counter("fs_bytes_total", &labels)
        };
        let counter = |name| context.metrics.counter(name, &[("device", context.id)]);
        let metrics = Metrics {
            requests: counter("fs_requests_total"),
            to_guest: bytes("to-guest"),
            from_guest: bytes("from-guest"),
            refused: counter("fs_refused_chains_total"),
        };
        Ok(Box::new(Fs::new(tag, source, metrics, Arc::new(LogLimit::new(2)))))
    }
}

fn serve(config: &FsDirectory, fds: &mut FdTable) -> Result<Server, CreateError> {
    if !(LEAST_FILES..=MOST_FILES).contains(&config.max_files) {
        return Err(CreateError::Value(format!(
            "{} files are what a guest may know of: give {LEAST_FILES} to {MOST_FILES}",
            config.max_files
        )));
    }
    let owners = match config.owners {
        FsOwners::Kept => Owners::Kept,
        FsOwners::One { uid, gid } => Owners::One { uid, gid },
    };
    // Most of what a guest knows it has not open.
    let files = usize::try_from(config.max_files).unwrap_or(usize::MAX);
    let options = Options {
        read_only: config.read_only,
        owners,
        max_nodes: files - files / 8,
        max_handles: files / 8,
    };
    let (directory, descriptors) = (fds.take(config.directory)?, fds.take(config.descriptors)?);
    Server::new(directory, descriptors, options).map_err(|error| CreateError::Value(error.to_string()))
}

fn tag(text: &str) -> Result<[u8; TAG], CreateError> {
    let mut tag = [0; TAG];
    match tag.get_mut(..text.len()) {
        Some(place) if !text.is_empty() && !text.contains('\0') => place.copy_from_slice(text.as_bytes()),
        _ => {
            return Err(CreateError::Value(format!(
                "{text:?} cannot be a tag: give 1 to {TAG} bytes without a null byte"
            )));
        }
    }
    Ok(tag)
}
