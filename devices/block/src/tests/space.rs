//! A disk whose file is on a file system without space: requests wait, and are done when there is some.

use std::ffi::CString;
use std::path::Path;
use std::time::Duration;

use rustix::mount::{MountFlags, UnmountFlags};

use super::*;

/// A small file system in memory.
struct Small(tempfile::TempDir);

impl Small {
    fn of(bytes: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let options = CString::new(format!("size={bytes}")).unwrap();
        rustix::mount::mount(
            "tmpfs",
            directory.path(),
            "tmpfs",
            MountFlags::empty(),
            options.as_c_str(),
        )
        .unwrap();
        Self(directory)
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        Path::new(self.0.path()).join(name)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        rustix::mount::unmount(self.0.path(), UnmountFlags::DETACH).unwrap();
    }
}

/// A disk of 1 MiB on a file system of 256 KiB, half of which is taken.
struct Rig {
    small: Small,
    file: File,
    alarm: SpaceAlarm,
    metrics: Registry,
    driver: Driver,
}

impl Rig {
    fn new(engine: BlockEngine) -> Self {
        let small = Small::of(256 << 10);
        std::fs::write(small.path("filling"), vec![1; 128 << 10]).unwrap();
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create_new(true)
            .open(small.path("disk"))
            .unwrap();
        file.set_len(1 << 20).unwrap();
        let (alarm, metrics) = (SpaceAlarm::new().unwrap(), Registry::new());
        let config = BlockConfig { engine, ..config() };
        let device = create_with(&file, &config, (&metrics, &alarm)).unwrap();
        let mut driver = Driver::new(device).with_queue_size(256);
        driver.start();
        Self {
            small,
            file,
            alarm,
            metrics,
            driver,
        }
    }

    /// Writes 64 KiB to each of several places; the requests.
    fn push(&mut self, places: std::ops::Range<u64>) -> Vec<Pushed> {
        let pushed = places.map(|place| {
            let data = pattern(usize::try_from(place).unwrap(), 64 << 10);
            self.driver
                .push(0, &[&header(VIRTIO_BLK_T_OUT, place * 128), &data], &[1])
        });
        let pushed = pushed.collect();
        self.driver.kick(0);
        pushed
    }

    fn wait_for_alarm(&self) {
        assert!(self.driver.wait_until(|_| !self.alarm.disks().is_empty()));
        assert_eq!(self.alarm.disks(), ["disk"]);
    }

    fn kept(&self) -> u64 {
        let samples = self.metrics.samples();
        let sample = samples.iter().find(|sample| sample.name == "block_no_space_total");
        sample.unwrap().value
    }

    fn make_space(&self) {
        std::fs::remove_file(self.small.path("filling")).unwrap();
    }

    /// All of these are answered well, in whatever order.
    fn all_are_answered(&mut self, mut pushed: Vec<Pushed>) {
        while !pushed.is_empty() {
            let used = self.driver.wait_used(0).expect("an answer");
            let at = pushed.iter().position(|one| one.head == used.head).unwrap();
            let one = pushed.swap_remove(at);
            assert_eq!(self.driver.bytes(one.writable[0]), [OK]);
        }
    }
}

#[test]
fn a_write_without_space_waits_and_is_done_when_the_device_goes_on_with_some() {
    for engine in ENGINES {
        let mut rig = Rig::new(engine);
        let fits = rig.push(0..2);
        rig.all_are_answered(fits);
        let waits = rig.push(2..3);
        rig.wait_for_alarm();
        // Others do not wait for it.
        assert_eq!(read(&mut rig.driver, 2047, 512).0, OK);
        assert_eq!(rig.kept(), 1);
        rig.driver.device().pause();
        let refused = rig.driver.device().save().unwrap_err().to_string();
        assert!(refused.contains("no space left"), "{refused}");
        // There is still none.
        rig.alarm.clear();
        rig.driver.device().resume().unwrap();
        rig.wait_for_alarm();
        assert!(rig.driver.poll_used(0).is_none(), "{engine:?}: answered without space");
        rig.driver.device().pause();
        rig.make_space();
        rig.alarm.clear();
        rig.driver.device().resume().unwrap();
        rig.all_are_answered(waits);
        assert!(rig.alarm.disks().is_empty());
        for place in 0..3 {
            let wanted = pattern(usize::try_from(place).unwrap(), 64 << 10);
            assert_eq!(
                read(&mut rig.driver, place * 128, 64 << 10),
                (OK, wanted),
                "{engine:?} {place}"
            );
        }
        rig.driver.device().pause();
        rig.driver.device().save().expect("nothing waits any more");
    }
}

#[test]
fn every_request_of_a_full_queue_waits_and_is_answered_once() {
    for engine in ENGINES {
        let mut rig = Rig::new(engine);
        // The places are written again and again, so that all fit once there is space.
        let mut pushed = Vec::new();
        for _ in 0..20 {
            pushed.extend(rig.push(0..3));
        }
        rig.wait_for_alarm();
        rig.driver.device().pause();
        rig.make_space();
        rig.alarm.clear();
        rig.driver.device().resume().unwrap();
        rig.all_are_answered(pushed);
        assert!(rig.driver.poll_used(0).is_none(), "{engine:?}: answered twice");
        let wanted = pattern(2, 64 << 10);
        assert_eq!(read(&mut rig.driver, 256, 64 << 10), (OK, wanted));
    }
}

#[test]
fn a_reset_forgets_what_waits() {
    for engine in ENGINES {
        let mut rig = Rig::new(engine);
        rig.push(0..3);
        rig.wait_for_alarm();
        rig.driver.reset();
        rig.make_space();
        rig.driver.start();
        std::thread::sleep(Duration::from_millis(50));
        assert!(
            rig.driver.poll_used(0).is_none(),
            "{engine:?}: an old request is answered"
        );
        assert_eq!(write(&mut rig.driver, 0, &pattern(9, 512)), OK);
        assert_eq!(rig.file.metadata().unwrap().len(), 1 << 20);
    }
}
