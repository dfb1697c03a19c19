//! The way from a device back to its driver: which vector each queue has, and what is pending without one.
//!
//! Everything here is atomic. A device signals from its own threads while a vCPU holds the transport's lock and waits
//! for those very threads to stop, so signalling takes no lock of the transport.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use engine::Interrupt;
use serde::{Deserialize, Serialize};

use crate::device::QueueInterrupt;

/// `VIRTIO_MSI_NO_VECTOR` (4.1.5.1.2).
pub(crate) const NO_VECTOR: u16 = 0xffff;

/// ISR status bits (4.1.4.5).
const ISR_QUEUE: u8 = 1 << 0;
const ISR_CONFIG: u8 = 1 << 1;

/// The signals as they are saved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SignalState {
    pub(crate) queue_vectors: Vec<u16>,
    pub(crate) config_vector: u16,
    pub(crate) isr: u8,
    pub(crate) generation: u8,
}

pub(crate) struct Signals {
    interrupts: Vec<Arc<dyn Interrupt>>,
    queue_vectors: Vec<AtomicU16>,
    config_vector: AtomicU16,
    isr: AtomicU8,
    generation: AtomicU8,
}

impl Signals {
    pub(crate) fn new(interrupts: Vec<Arc<dyn Interrupt>>, queues: usize) -> Self {
        Self {
            interrupts,
            queue_vectors: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            config_vector: AtomicU16::new(NO_VECTOR),
            isr: AtomicU8::new(0),
            generation: AtomicU8::new(0),
        }
    }

    /// No vectors, nothing pending.
    pub(crate) fn reset(&self) {
        for vector in self.queue_vectors.iter().chain([&self.config_vector]) {
            vector.store(NO_VECTOR, Ordering::Relaxed);
        }
        self.isr.store(0, Ordering::Relaxed);
    }

    /// Whoever saves has seen to it that nobody signals meanwhile.
    pub(crate) fn save(&self) -> SignalState {
        let vectors = self.queue_vectors.iter();
        SignalState {
            queue_vectors: vectors.map(|vector| vector.load(Ordering::Relaxed)).collect(),
            config_vector: self.config_vector(),
            isr: self.isr.load(Ordering::Acquire),
            generation: self.generation(),
        }
    }

    /// Takes over what [`Self::save`] gave; false, and nothing done, if that had another number of queues.
    pub(crate) fn restore(&self, saved: &SignalState) -> bool {
        if saved.queue_vectors.len() != self.queue_vectors.len() {
            return false;
        }
        for (queue, &vector) in saved.queue_vectors.iter().enumerate() {
            self.set_queue_vector(queue, vector);
        }
        self.set_config_vector(saved.config_vector);
        self.isr.store(saved.isr, Ordering::Release);
        self.generation.store(saved.generation, Ordering::Release);
        true
    }

    pub(crate) fn queue_vector(&self, queue: usize) -> u16 {
        self.queue_vectors
            .get(queue)
            .map_or(NO_VECTOR, |vector| vector.load(Ordering::Relaxed))
    }

    /// Maps a queue to a vector; one that does not exist reads back as `NO_VECTOR` (4.1.5.1.2.1).
    pub(crate) fn set_queue_vector(&self, queue: usize, vector: u16) {
        if let Some(slot) = self.queue_vectors.get(queue) {
            slot.store(self.existing(vector), Ordering::Relaxed);
        }
    }

    pub(crate) fn config_vector(&self) -> u16 {
        self.config_vector.load(Ordering::Relaxed)
    }

    pub(crate) fn set_config_vector(&self, vector: u16) {
        self.config_vector.store(self.existing(vector), Ordering::Relaxed);
    }

    /// Reading the ISR status clears it (4.1.4.5.1).
    pub(crate) fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::AcqRel)
    }

    pub(crate) fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    fn existing(&self, vector: u16) -> u16 {
        if usize::from(vector) < self.interrupts.len() {
            vector
        } else {
            NO_VECTOR
        }
    }

    fn fire(&self, vector: u16, isr: u8) {
        match self.interrupts.get(usize::from(vector)) {
            Some(interrupt) => interrupt.trigger(),
            // Without a vector the driver can only poll the ISR status; there is no INTx.
            None => {
                self.isr.fetch_or(isr, Ordering::AcqRel);
            }
        }
    }
}

impl QueueInterrupt for Signals {
    fn signal_queue(&self, index: u16) {
        self.fire(self.queue_vector(usize::from(index)), ISR_QUEUE);
    }

    fn signal_config(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.fire(self.config_vector(), ISR_CONFIG);
    }
}
