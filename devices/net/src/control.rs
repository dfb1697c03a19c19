//! The control queue (5.1.6.5): how many queue pairs are in use. Every other command is refused.

use std::io::{Read, Write};
use std::sync::Arc;

use memory::GuestRam;
use virtio::{ActiveQueue, Chain, QueueInterrupt, RingError};
use virtio_bindings::virtio_net::{VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, VIRTIO_NET_ERR, VIRTIO_NET_OK};

use crate::config::CONTROL_SIZE;
use crate::device::Pairs;
use crate::metrics::Metrics;
use crate::worker::Pass;

/// The control queue and what it rules.
pub(crate) struct Control {
    pub(crate) queue: ActiveQueue,
    pub(crate) pairs: Arc<Pairs>,
    /// Its ring contradicts itself: it is left alone until the next reset.
    pub(crate) broken: bool,
}

impl Control {
    /// Carries out what is there.
    pub(crate) fn serve(
        &mut self,
        memory: &GuestRam,
        interrupt: &dyn QueueInterrupt,
        metrics: &Metrics,
    ) -> Result<Pass, RingError> {
        self.queue.disable_kicks(memory)?;
        for _ in 0..CONTROL_SIZE {
            let Some(available) = self.queue.take(memory)? else {
                break;
            };
            match available.check() {
                Ok(chain) => {
                    let written = self.command(&chain, metrics);
                    self.queue.complete(memory, chain.head(), written)?;
                }
                Err(bad) => {
                    metrics.refused.increment();
                    self.queue.complete(memory, bad.head, 0)?;
                }
            }
        }
        self.queue.notify(memory, interrupt)?;
        Ok(if self.queue.enable_kicks(memory)? {
            Pass::More
        } else {
            Pass::Idle
        })
    }

    /// Carries out one command; returns how many bytes of answer there are.
    fn command(&self, chain: &Chain<'_>, metrics: &Metrics) -> u32 {
        let mut answer = chain.writer();
        if answer.remaining() == 0 {
            metrics.refused.increment();
            return 0;
        }
        let done = self.set_pairs(chain);
        if !done {
            metrics.refused_commands.increment();
        }
        let code = if done { VIRTIO_NET_OK } else { VIRTIO_NET_ERR };
        let written = answer.write(&[u8::try_from(code).unwrap_or(u8::MAX)]).unwrap_or(0);
        u32::try_from(written).unwrap_or(0)
    }

    /// VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET (5.1.6.5.5); false for anything else.
    fn set_pairs(&self, chain: &Chain<'_>) -> bool {
        // class, command, virtqueue_pairs
        let mut bytes = [0; 4];
        if chain.reader().read(&mut bytes).unwrap_or(0) < bytes.len() {
            return false;
        }
        let [class, command, low, high] = bytes;
        if (u32::from(class), u32::from(command)) != (VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET) {
            return false;
        }
        let count = usize::from(u16::from_le_bytes([low, high]));
        match self.pairs.set(count) {
            Ok(done) => done,
            Err(error) => {
                log::warn!("net: {count} queue pairs could not be put to use: {error}");
                false
            }
        }
    }
}
