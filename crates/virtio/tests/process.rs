//! The kit's checks of a whole process against a device that is broken on purpose: it spins, and it says many lines for
//! each activation. A test binary of its own, as the log is the process's.

use base::Worker;
use virtio::conformance::driver::Driver;
use virtio::conformance::process::{broken_rings_fill_no_log, rests};
use virtio::{Activation, ActiveQueue, DeviceError, VirtioDevice};

/// Its thread is called `spins` and never waits.
#[derive(Default)]
struct Loud(Option<Worker<Vec<ActiveQueue>>>);

impl VirtioDevice for Loud {
    fn device_type(&self) -> u16 {
        4
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[8]
    }

    fn read_config(&self, _offset: usize, _data: &mut [u8]) {}

    fn write_config(&mut self, _offset: usize, _data: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> Result<(), DeviceError> {
        // More than may be said in the time that a busy machine takes for all activations.
        for _ in 0..100 {
            log::warn!("here we go again");
        }
        let worker = Worker::spawn("spins", activation.queues, |queues, stop| {
            let epoll = base::Epoll::new().unwrap();
            epoll.add(stop.fd(), 0, base::Interest::READ).unwrap();
            let mut ready = Vec::new();
            while ready.is_empty() {
                epoll.wait(&mut ready, Some(std::time::Duration::ZERO)).unwrap();
            }
            queues
        });
        self.0 = Some(worker?);
        Ok(())
    }

    fn deactivate(&mut self) -> Vec<ActiveQueue> {
        self.0.take().and_then(Worker::stop).unwrap_or_default()
    }
}

#[test]
fn a_loud_device_that_spins_fails() {
    assert!(rests("spins", "nothing").unwrap_err().what.contains("no thread"));
    let mut driver = Driver::new(Box::new(Loud::default()));
    let failure = broken_rings_fill_no_log(&mut driver, 0).unwrap_err();
    assert!(failure.what.starts_with("it said 10000 lines"), "{failure}");
    driver.start();
    let failure = rests("spins", "a driver that does nothing").unwrap_err();
    assert!(failure.what.contains("the thread ran for"), "{failure}");
}
