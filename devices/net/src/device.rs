//! The device: what the driver sees of it, its queue pairs and their workers.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base::{EventFd, Worker};
use serde::{Deserialize, Serialize};
use state::{Saved, Schema};
use virtio::virtio_queue::QueueT;
use virtio::{Activation, ActiveQueue, DeviceError, VirtioDevice};
use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::VIRTIO_NET_F_MQ;
use vmm_api::devices::NetConfig;

use crate::config::{CONTROL_SIZE, ConfigSpace, Features, QUEUE_SIZE};
use crate::control::Control;
use crate::metrics::Metrics;
use crate::rate_limiters::RateLimiters;
use crate::receive::Receive;
use crate::tap::Tap;
use crate::transmit::Transmit;
use crate::worker::Pair;

/// The TAPs, and how many of them are in use. A TAP that is in use is attached; one that is not may still be, while the
/// driver has not said how many it wants: what it gets then waits in the TAP.
pub(crate) struct Pairs {
    taps: Vec<(Tap, EventFd)>,
    in_use: AtomicUsize,
    attached: Mutex<Vec<bool>>,
}

impl Pairs {
    pub(crate) fn new(taps: Vec<Tap>) -> io::Result<Self> {
        let attached = taps.iter().map(Tap::is_attached).collect::<io::Result<_>>()?;
        Ok(Self {
            in_use: AtomicUsize::new(1),
            attached: Mutex::new(attached),
            taps: taps
                .into_iter()
                .map(|tap| Ok((tap, EventFd::new()?)))
                .collect::<io::Result<_>>()?,
        })
    }

    fn len(&self) -> usize {
        self.taps.len()
    }

    pub(crate) fn tap(&self, index: usize) -> &Tap {
        &self.taps[index].0
    }

    /// Signalled when pair `index` has to look at its TAP again.
    pub(crate) fn changed(&self, index: usize) -> &EventFd {
        &self.taps[index].1
    }

    /// Whether the driver wants packets from this pair.
    pub(crate) fn is_in_use(&self, index: usize) -> bool {
        index < self.in_use.load(Ordering::Acquire)
    }

    /// Uses the first `count` pairs; false if there are not so many.
    pub(crate) fn set(&self, count: usize) -> io::Result<bool> {
        if count == 0 || count > self.len() {
            return Ok(false);
        }
        self.attach(count)?;
        self.in_use.store(count, Ordering::Release);
        for (_, changed) in &self.taps {
            changed.signal();
        }
        Ok(true)
    }

    /// The kernel spreads packets over the first `count` TAPs only.
    fn attach(&self, count: usize) -> io::Result<()> {
        let mut attached = self.attached.lock().unwrap_or_else(PoisonError::into_inner);
        for (index, ((tap, _), attached)) in self.taps.iter().zip(attached.iter_mut()).enumerate() {
            let wanted = index < count;
            if *attached != wanted {
                tap.set_attached(wanted)?;
                *attached = wanted;
            }
        }
        Ok(())
    }

    /// The state after a reset: one pair in use, the others ready if the driver can ask for them.
    fn restart(&self, multiqueue: bool) -> io::Result<()> {
        self.in_use.store(1, Ordering::Release);
        self.attach(if multiqueue { self.len() } else { 1 })
    }
}

/// What is saved: the driver does not say again how many pairs it uses.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NetState {
    /// How many queue pairs the driver has asked for.
    pub(crate) pairs: usize,
}

impl Schema for NetState {
    const KIND: &'static str = "net";
    const VERSION: u32 = 1;
}

/// A virtio-net device.
pub(crate) struct Net {
    pairs: Arc<Pairs>,
    mtu: u16,
    features: Features,
    config: ConfigSpace,
    queue_sizes: Vec<u16>,
    limits: RateLimiters,
    metrics: Arc<Metrics>,
    workers: Vec<Worker<Pair>>,
    /// Queues that no worker serves: the driver has enabled one of a pair.
    idle: Vec<ActiveQueue>,
}

impl Net {
    pub(crate) fn new(taps: Vec<Tap>, config: &NetConfig, limits: RateLimiters, metrics: Metrics) -> io::Result<Self> {
        let pairs = taps.len();
        let mut queue_sizes = vec![QUEUE_SIZE; 2 * pairs];
        if pairs > 1 {
            queue_sizes.push(CONTROL_SIZE);
        }
        Ok(Self {
            pairs: Arc::new(Pairs::new(taps)?),
            mtu: config.mtu,
            features: Features::offered(pairs),
            config: ConfigSpace::new(config),
            queue_sizes,
            limits,
            metrics: Arc::new(metrics),
            workers: Vec::new(),
            idle: Vec::new(),
        })
    }

    fn start(&mut self, activation: Activation) -> Result<(), DeviceError> {
        let features = Features(activation.features);
        let mut queues = activation.queues.into_iter().map(Some).collect::<Vec<_>>();
        let mut take = |index: usize| {
            let found = queues
                .iter_mut()
                .find(|queue| queue.as_ref().is_some_and(|queue| usize::from(queue.index) == index));
            found.and_then(Option::take)
        };
        // The control queue first: it may have the number of a pair's queue when the driver does not use the pairs.
        let mut control = features.control_queue(self.pairs.len()).and_then(&mut take);
        // After a pause the driver does not say again how many pairs it uses; after a reset no command has been taken.
        let goes_on = control.as_ref().is_some_and(|queue| queue.queue.next_avail() != 0);
        if !goes_on {
            self.pairs.restart(features.has(VIRTIO_NET_F_MQ))?;
        }
        self.pairs.tap(0).set_offload(features)?;
        let mut workers = Vec::new();
        for index in 0..self.pairs.len() {
            let (receive, transmit) = match (take(2 * index), take(2 * index + 1)) {
                (Some(receive), Some(transmit)) => (receive, transmit),
                (one, other) => {
                    self.idle.extend([one, other].into_iter().flatten());
                    continue;
                }
            };
            workers.push(Pair {
                index,
                pairs: Arc::clone(&self.pairs),
                receive: Receive {
                    queue: receive,
                    limit: self.limits.receive.clone(),
                    broken: false,
                    mergeable: features.mergeable(),
                    largest: features.largest_received(self.mtu),
                    ready: true,
                },
                transmit: Transmit {
                    queue: transmit,
                    limit: self.limits.transmit.clone(),
                    broken: false,
                },
                control: control.take().map(|queue| Control {
                    queue,
                    pairs: Arc::clone(&self.pairs),
                    broken: false,
                }),
                memory: Arc::clone(&activation.memory),
                interrupt: Arc::clone(&activation.interrupt),
                metrics: Arc::clone(&self.metrics),
            });
        }
        self.idle
            .extend(control.into_iter().chain(queues.into_iter().flatten()));
        if workers.first().is_none_or(|pair| pair.index != 0) {
            return Err(DeviceError::MissingQueue(0));
        }
        for pair in workers {
            let epoll = pair.watch()?;
            let name = format!("net-q{}", pair.index);
            let worker = Worker::spawn(&name, pair, move |pair, stop| pair.run(&epoll, stop))?;
            self.workers.push(worker);
        }
        Ok(())
    }
}

impl VirtioDevice for Net {
    fn device_type(&self) -> u16 {
        u16::try_from(VIRTIO_ID_NET).unwrap_or(u16::MAX)
    }

    fn features(&self) -> u64 {
        self.features.0
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        self.config.read(offset, data);
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
        let mut queues = std::mem::take(&mut self.idle);
        for worker in std::mem::take(&mut self.workers) {
            match worker.stop() {
                Some(pair) => queues.extend(pair.into_queues()),
                None => log::error!("net: a queue pair was lost with its worker"),
            }
        }
        queues.sort_by_key(|queue| queue.index);
        queues
    }

    fn save(&self) -> Result<Saved, DeviceError> {
        let pairs = self.pairs.in_use.load(Ordering::Acquire);
        Ok(Saved::of(&NetState { pairs })?)
    }

    fn restore(&mut self, saved: &Saved) -> Result<(), DeviceError> {
        let NetState { pairs } = saved.read("net")?;
        if !self.pairs.set(pairs)? {
            return Err(DeviceError::Unlike(format!("its driver uses {pairs} queue pairs")));
        }
        Ok(())
    }
}
