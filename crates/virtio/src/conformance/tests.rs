//! The kit against a good device and against devices that are broken in one way each: a check that cannot fail is none.

use std::sync::Arc;
use std::time::Duration;

use base::{Epoll, Interest, StopSignal, Worker};
use memory::GuestRam;
use serde::{Deserialize, Serialize};
use state::{Saved, Schema};
use virtio_queue::QueueT;

use super::{Failure, Request, Subject, run};
use crate::device::{Activation, ActiveQueue, DeviceError, QueueInterrupt, VirtioDevice};

/// What is wrong with the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    ForgetsBuffer,
    KeepsQueue,
    NeverInterrupts,
    IgnoresEarlyBuffers,
    WritesIntoReadable,
    OverstatesLength,
    PanicsOnConfig,
    TrustsAddresses,
    StopsAfterReset,
    RefusesItsState,
    ReadsConfigUnevenly,
}

struct Echo {
    flaw: Flaw,
    starts: u32,
    worker: Option<Worker<Vec<ActiveQueue>>>,
}

struct Shop {
    flaw: Flaw,
    memory: Arc<GuestRam>,
    interrupt: Arc<dyn QueueInterrupt>,
}

impl Shop {
    fn serve(&self, queue: &mut ActiveQueue) {
        use vm_memory::Bytes;
        let memory = self.memory.as_ref();
        // A ring that contradicts itself is left alone.
        while let Ok(Some(available)) = queue.take(memory) {
            match available.check() {
                Ok(_) if self.flaw == Flaw::ForgetsBuffer => (),
                Ok(chain) => {
                    if self.flaw == Flaw::WritesIntoReadable {
                        chain.readable()[0].write_slice(&[0xee], 0).unwrap();
                    }
                    let excess = u32::from(self.flaw == Flaw::OverstatesLength);
                    let length = u32::try_from(chain.writable_bytes()).unwrap();
                    queue.complete(memory, chain.head(), length + excess).unwrap();
                }
                Err(bad) if self.flaw == Flaw::TrustsAddresses => panic!("trusted {bad}"),
                Err(bad) => queue.complete(memory, bad.head, 0).unwrap(),
            }
        }
        if self.flaw != Flaw::NeverInterrupts {
            queue.notify(memory, self.interrupt.as_ref()).unwrap();
        }
    }

    fn run(&self, mut queues: Vec<ActiveQueue>, stop: &StopSignal) -> Vec<ActiveQueue> {
        let epoll = Epoll::new().unwrap();
        epoll.add(stop.fd(), 99, Interest::READ).unwrap();
        for (token, queue) in (0..).zip(&queues) {
            epoll.add(queue.kick.as_ref(), token, Interest::READ).unwrap();
        }
        let mut ready = Vec::new();
        let mut first = self.flaw != Flaw::IgnoresEarlyBuffers;
        loop {
            if !std::mem::take(&mut first) {
                epoll.wait(&mut ready, None).unwrap();
            }
            for queue in &mut queues {
                queue.kick.consume();
                self.serve(queue);
                while let Ok(true) = queue.enable_kicks(&self.memory) {
                    let before = queue.queue.next_avail();
                    self.serve(queue);
                    if before == queue.queue.next_avail() {
                        break;
                    }
                }
            }
            if ready.iter().any(|ready| ready.token == 99) {
                return queues;
            }
        }
    }
}

impl VirtioDevice for Echo {
    fn device_type(&self) -> u16 {
        42
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[64, 64]
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        if self.flaw == Flaw::PanicsOnConfig {
            data[0] = [1, 2, 3, 4, 5][offset];
        }
        if self.flaw == Flaw::ReadsConfigUnevenly {
            data.fill(u8::try_from(data.len()).unwrap());
        }
    }

    fn write_config(&mut self, _: usize, _: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        self.starts += 1;
        let shop = Shop {
            flaw: self.flaw,
            memory: activation.memory,
            interrupt: activation.interrupt,
        };
        let deaf = self.flaw == Flaw::StopsAfterReset && self.starts > 1;
        self.worker = Some(Worker::spawn("echo", activation.queues, move |queues, stop| {
            if deaf { queues } else { shop.run(queues, stop) }
        })?);
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        let mut queues = self.worker.take().and_then(Worker::stop).unwrap_or_default();
        if self.flaw == Flaw::KeepsQueue {
            queues.pop();
        }
        queues
    }

    fn save(&self) -> Result<Saved, DeviceError> {
        Ok(Saved::of(&Starts(self.starts))?)
    }

    fn restore(&mut self, saved: &Saved) -> Result<(), DeviceError> {
        if self.flaw == Flaw::RefusesItsState {
            return Err(DeviceError::Lost);
        }
        self.starts = saved.read::<Starts>("echo")?.0;
        Ok(())
    }
}

#[derive(Serialize, Deserialize)]
struct Starts(u32);

impl Schema for Starts {
    const KIND: &'static str = "echo";
    const VERSION: u32 = 1;
}

fn check(flaw: Flaw) -> Result<usize, Failure> {
    let make = move || -> Box<dyn VirtioDevice> {
        Box::new(Echo {
            flaw,
            starts: 0,
            worker: None,
        })
    };
    let request = Request {
        queue: 1,
        readable: b"hello".to_vec(),
        writable: 16,
    };
    let mut subject = Subject::new(make, request);
    if flaw != Flaw::None {
        // What it never does is waited for to the end.
        subject.patience = Duration::from_secs(10);
    }
    run(&subject)
}

#[test]
fn a_good_device_passes_every_check() {
    assert_eq!(
        check(Flaw::None),
        Ok(super::checks::ALL.len() + super::hostile::ALL.len())
    );
}

#[track_caller]
fn fails(flaw: Flaw, check_name: &str, what: &str) {
    let failure = check(flaw).expect_err("the kit finds nothing wrong");
    assert!(
        failure.check.contains(check_name) && failure.what.contains(what),
        "{flaw:?} was found by the wrong check: {failure}"
    );
}

#[test]
fn a_device_that_keeps_a_queue_fails() {
    fails(Flaw::KeepsQueue, "queues come back", "gave back [0]");
}

#[test]
fn a_device_that_never_interrupts_fails() {
    fails(Flaw::NeverInterrupts, "a request is completed", "no interrupt");
}

#[test]
fn a_device_that_waits_for_a_kick_it_may_not_expect_fails() {
    fails(Flaw::IgnoresEarlyBuffers, "before the start", "not completed");
}

#[test]
fn a_device_that_writes_where_it_may_only_read_fails() {
    fails(Flaw::WritesIntoReadable, "a request is completed", "only read");
}

#[test]
fn a_device_that_overstates_what_it_wrote_fails() {
    fails(Flaw::OverstatesLength, "a request is completed", "17 bytes");
}

#[test]
fn a_device_that_indexes_with_a_guests_offset_fails() {
    fails(Flaw::PanicsOnConfig, "configuration", "panics");
}

#[test]
fn a_device_whose_configuration_depends_on_the_width_fails() {
    fails(Flaw::ReadsConfigUnevenly, "configuration", "32-bit read");
}

#[test]
fn a_device_that_trusts_addresses_fails() {
    fails(Flaw::TrustsAddresses, "hostile ring", "gave back []");
}

#[test]
fn a_device_that_forgets_a_buffer_fails() {
    fails(Flaw::ForgetsBuffer, "a request is completed", "not completed");
}

#[test]
fn a_device_that_refuses_its_own_state_fails() {
    fails(Flaw::RefusesItsState, "saved and restored", "it has lost");
}

#[test]
fn a_device_that_works_only_once_fails() {
    fails(Flaw::StopsAfterReset, "pause", "not completed");
}
