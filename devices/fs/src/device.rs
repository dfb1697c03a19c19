//! The device: what the driver sees of it, and its workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::Worker;
use fuse::{Answer, Known, Reply};
use observe::LogLimit;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use state::{Saved, Schema};
use virtio::{Activation, ActiveQueue, DeviceError, QueueLoop, VirtioDevice};
use virtio_bindings::virtio_ids::VIRTIO_ID_FS;

use crate::worker::Serving;
use crate::{Metrics, TAG};

/// The queue of requests that must not wait behind others (5.11.2), and the one of all others. Linux takes as many pages
/// a request as the queue has entries, less four.
const QUEUE_SIZES: [u16; 2] = [128, 256];

/// `num_request_queues` (5.11.4), behind the tag.
const REQUEST_QUEUES: u32 = 1;

/// The queue of all but urgent requests. The first one of a mount comes here, and without an answer to it no other comes.
const REQUESTS: u16 = 1;

/// The thread of a device without a directory: it needs no right to files.
const DORMANT_THREAD: &str = "fs-dormant";

/// The thread that looks at files for a snapshot, or finds them again: its name is one of those that have a right to them.
const FILES_THREAD: &str = "fs-q-files";

/// What a guest knows of a directory.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FsState {
    /// `None` where it has asked nothing.
    #[serde(default)]
    known: Option<Known>,
}

impl Schema for FsState {
    const KIND: &'static str = "fs";
    const VERSION: u32 = 2;
    // Only of devices that nobody had asked anything.
    const OLDEST: u32 = 1;
}

/// A directory that is not there.
struct Nowhere;

impl Answer for Nowhere {
    fn answer(&self, request: &[u8], room: usize, reply: &mut Reply) {
        reply.refuse(request, room, Errno::NODEV);
    }

    fn known(&self) -> Result<Known, fuse::Error> {
        // What it was refused a guest does not know.
        Ok(Known::default())
    }

    fn know(&self, known: &Known) -> Result<usize, fuse::Error> {
        Ok(known.nodes.len() + known.handles.len())
    }
}

/// A virtio-fs device.
pub(crate) struct Fs {
    config: [u8; TAG + 4],
    /// Where it is served.
    server: Arc<dyn Answer>,
    /// Nowhere: nobody has to look after its urgent requests, and nobody needs a right to files.
    dormant: bool,
    metrics: Metrics,
    // Outlives activations, or a guest could have a line with each reset.
    log_limit: Arc<LogLimit>,
    workers: Vec<Worker<Serving>>,
    /// Those that nobody serves.
    resting: Vec<ActiveQueue>,
    /// There was a request.
    asked: Arc<AtomicBool>,
}

impl Fs {
    pub(crate) fn new(
        tag: [u8; TAG],
        server: Option<Arc<dyn Answer>>,
        metrics: Metrics,
        log_limit: Arc<LogLimit>,
    ) -> Self {
        let mut config = [0; TAG + 4];
        config[..TAG].copy_from_slice(&tag);
        config[TAG..].copy_from_slice(&REQUEST_QUEUES.to_le_bytes());
        Self {
            config,
            dormant: server.is_none(),
            server: server.unwrap_or_else(|| Arc::new(Nowhere)),
            metrics,
            log_limit,
            workers: Vec::new(),
            resting: Vec::new(),
            asked: Arc::default(),
        }
    }

    /// Does something with the files that it serves, on a thread that may.
    fn by_files<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Answer) -> Result<T, fuse::Error> + Send + 'static,
    ) -> Result<T, DeviceError> {
        let server = Arc::clone(&self.server);
        let done = match self.dormant {
            true => work(server.as_ref()),
            false => base::thread::spawn(FILES_THREAD, 128 << 10, move || work(server.as_ref()))?
                .join()
                .map_err(|_| DeviceError::Lost)?,
        };
        done.map_err(|error| DeviceError::Refused(error.to_string()))
    }

    fn start(&mut self, activation: Activation) -> Result<(), DeviceError> {
        for queue in 0..QUEUE_SIZES.len() {
            if !activation.queues.iter().any(|other| usize::from(other.index) == queue) {
                return Err(DeviceError::MissingQueue(u16::try_from(queue).unwrap_or(u16::MAX)));
            }
        }
        for queue in activation.queues {
            let name = match self.dormant {
                false => format!("fs-q{}", queue.index),
                true if queue.index == REQUESTS => DORMANT_THREAD.to_owned(),
                true => {
                    self.resting.push(queue);
                    continue;
                }
            };
            let queue_loop = QueueLoop::of(&queue)?;
            let serving = Serving {
                queue,
                memory: Arc::clone(&activation.memory),
                interrupt: Arc::clone(&activation.interrupt),
                server: Arc::clone(&self.server),
                asked: Arc::clone(&self.asked),
                metrics: self.metrics.clone(),
                log_limit: Arc::clone(&self.log_limit),
            };
            let worker = Worker::spawn(&name, serving, move |serving, stop| serving.run(&queue_loop, stop))?;
            self.workers.push(worker);
        }
        Ok(())
    }
}

impl VirtioDevice for Fs {
    fn device_type(&self) -> u16 {
        u16::try_from(VIRTIO_ID_FS).unwrap_or(u16::MAX)
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let end = offset.saturating_add(data.len()).min(self.config.len());
        if let Some(source) = self.config.get(offset..end) {
            data[..source.len()].copy_from_slice(source);
        }
    }

    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let started = self.start(activation);
        if started.is_err() {
            drop(self.deactivate());
        }
        started
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let mut queues = std::mem::take(&mut self.resting);
        for worker in std::mem::take(&mut self.workers) {
            match worker.stop() {
                Some(serving) => queues.push(serving.queue),
                None => log::error!("fs: a queue was lost with its worker"),
            }
        }
        queues
    }

    fn save(&self) -> Result<Saved, DeviceError> {
        let known = match self.asked.load(Ordering::Relaxed) {
            false => None,
            true => Some(self.by_files(|server| server.known())?),
        };
        Ok(Saved::of(&FsState { known })?)
    }

    fn restore(&mut self, saved: &Saved) -> Result<(), DeviceError> {
        let FsState { known } = saved.read("fs")?;
        let Some(known) = known else { return Ok(()) };
        self.asked.store(true, Ordering::Relaxed);
        let all = known.nodes.len() + known.handles.len();
        let lost = self.by_files(move |server| server.know(&known))?;
        if lost > 0 {
            log::info!("fs: of {all} files that the guest knows, {lost} are no longer there, or are others");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use fuse::{KnownFile, KnownHandle, KnownNode, Path};

    use super::*;

    #[test]
    fn the_state_is_what_the_golden_file_says() {
        let file = |path: Path| KnownFile {
            path,
            inode: 12,
            born_ns: 1_700_000_000_000_000_000,
        };
        let nodes = [(2, Path::Text("a/b".into())), (5, Path::Bytes(vec![b'c', 0xff]))];
        let nodes = nodes.map(|(id, path)| {
            (
                id,
                KnownNode {
                    lookups: 3,
                    file: file(path),
                },
            )
        });
        let handle = KnownHandle {
            access: 2,
            append: true,
            file: file(Path::Text("a/b".into())),
        };
        let known = Known {
            last_node: 7,
            last_handle: 9,
            nodes: nodes.into(),
            handles: [(4, handle)].into(),
        };
        state::golden::check(env!("CARGO_MANIFEST_DIR"), &FsState { known: Some(known) });
        let first: FsState = state::golden::load(env!("CARGO_MANIFEST_DIR"), 1);
        assert_eq!(first, FsState::default());
    }
}
