//! Resets that take their time: devices of several sandboxes are reset side by side, and one whose reset stands still keeps no other sandbox from
//! ending, and no other device from being bound.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use node_api::{BindTerms, DeviceState, SandboxConfig, State};

use super::devices::{NVME, address, bind, state};
use super::{World, soon};

const NIC: &str = "0000:02:00.0";

/// Longer than anything here takes that waits for nobody.
const AT_ONCE: Duration = Duration::from_secs(10);

fn world() -> World {
    let world = World::new();
    bind(&world, NVME).unwrap();
    world.node().devices.bind(address(NIC), BindTerms::default()).unwrap();
    world
}

/// A reset that stands still until this is dropped.
struct Standing {
    _goes_on: Sender<()>,
    begun: Receiver<()>,
}

impl Standing {
    fn of(world: &World, device: &'static str) -> Self {
        let (goes_on, waits) = channel::<()>();
        let (begins, begun) = channel();
        let ends = Mutex::new((begins, waits));
        world.kernel.on_write(Arc::new(move |path, _| {
            if path.ends_with(format!("{device}/reset")) {
                let (begins, waits) = &*ends.lock().unwrap();
                // Nobody may wait for the begin; the end is the other side's.
                let _ = begins.send(());
                waits.recv().unwrap_err();
            }
            Ok(())
        }));
        Self {
            _goes_on: goes_on,
            begun,
        }
    }

    /// Waits until the device is being reset, by whoever has begun to: what is recorded of it says so before that.
    fn wait_for_begin(&self) {
        self.begun.recv_timeout(AT_ONCE).unwrap();
    }
}

#[test]
fn devices_of_two_sandboxes_are_reset_side_by_side() {
    let world = world();
    let devices = &world.node().devices;
    devices.claim("aaaaaaaaaaaa", &[address(NVME)]).unwrap();
    devices.claim("bbbbbbbbbbbb", &[address(NIC)]).unwrap();
    // Each ends when both have begun.
    let begun = Arc::new(std::sync::atomic::AtomicU32::new(0));
    world.kernel.on_write(Arc::new(move |path, _| {
        if path.ends_with("reset") {
            begun.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            let end = Instant::now() + AT_ONCE;
            while begun.load(std::sync::atomic::Ordering::SeqCst) < 2 {
                if Instant::now() > end {
                    return Err(std::io::Error::other("it was reset alone"));
                }
                thread::sleep(Duration::from_millis(1));
            }
        }
        Ok(())
    }));
    thread::scope(|scope| {
        for sandbox in ["aaaaaaaaaaaa", "bbbbbbbbbbbb"] {
            scope.spawn(move || devices.release(sandbox).unwrap());
        }
    });
    for device in [NVME, NIC] {
        assert_eq!(state(&world, device), DeviceState::Ready);
        assert_eq!(world.kernel.resets(address(device)), 1);
    }
}

#[test]
fn one_that_stands_still_keeps_no_other_sandbox_from_ending() {
    let world = world();
    world.run(World::config("web")).unwrap();
    let config = SandboxConfig {
        ports: Vec::new(),
        ..World::config("db")
    };
    world.run(config).unwrap();
    let node = world.node();
    node.attach_devices(&world.entry("web"), &[address(NVME)]).unwrap();
    node.attach_devices(&world.entry("db"), &[address(NIC)]).unwrap();
    let standing = Standing::of(&world, NVME);
    thread::scope(|scope| {
        let stopped = scope.spawn(|| node.stop(&world.entry("web"), Duration::ZERO));
        standing.wait_for_begin();
        assert_eq!(state(&world, NVME), DeviceState::Resetting);
        let begun = Instant::now();
        // Whoever looks after what was left does not wait for it either.
        assert_eq!(node.devices.finish_resets(), 1);
        node.stop(&world.entry("db"), Duration::ZERO).unwrap();
        assert_eq!(world.entry("db").state(), State::Exited);
        assert_eq!(state(&world, NIC), DeviceState::Ready);
        // Others are bound, given and taken meanwhile, and that one is nobody's.
        node.devices.unbind(address(NIC)).unwrap();
        let refused = node.devices.claim("bbbbbbbbbbbb", &[address(NVME)]).unwrap_err();
        assert!(refused.to_string().contains("is resetting"), "{refused}");
        node.devices.unbind(address(NVME)).unwrap_err();
        assert!(begun.elapsed() < AT_ONCE, "{:?}", begun.elapsed());
        assert_eq!(state(&world, NVME), DeviceState::Resetting);
        drop(standing);
        stopped.join().unwrap().unwrap();
    });
    assert_eq!(state(&world, NVME), DeviceState::Ready);
    world.is_at_rest().unwrap();
    world.ends_empty().unwrap();
}

/// It would find it about to be nobody's.
#[test]
fn who_wants_a_device_waits_for_a_reset_that_does_not_stand_still() {
    let world = world();
    let devices = &world.node().devices;
    devices.claim("aaaaaaaaaaaa", &[address(NVME)]).unwrap();
    let standing = Standing::of(&world, NVME);
    thread::scope(|scope| {
        let released = scope.spawn(|| devices.release("aaaaaaaaaaaa"));
        standing.wait_for_begin();
        assert_eq!(state(&world, NVME), DeviceState::Resetting);
        let claimed = scope.spawn(|| devices.claim("bbbbbbbbbbbb", &[address(NVME)]));
        thread::sleep(Duration::from_millis(50));
        drop(standing);
        released.join().unwrap().unwrap();
        claimed.join().unwrap().unwrap();
    });
    assert_eq!(devices.of("bbbbbbbbbbbb"), [address(NVME)]);
    devices.release("bbbbbbbbbbbb").unwrap();
}

/// Between two of one sandbox's resets none is under way.
#[test]
fn who_wants_several_waits_for_the_reset_of_the_last() {
    let world = world();
    let devices = &world.node().devices;
    let both = [address(NVME), address(NIC)];
    devices.claim("000000000000", &both).unwrap();
    world.kernel.on_write(Arc::new(|path, _| {
        if path.ends_with("reset") {
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }));
    for number in 0..20 {
        let [before, next] = [number, number + 1].map(|number| format!("{number:012}"));
        thread::scope(|scope| {
            let released = scope.spawn(|| devices.release(&before));
            soon(|| match (state(&world, NVME), state(&world, NIC)) {
                (DeviceState::Claimed, _) => Err("nothing is reset yet".to_owned()),
                _ => Ok(()),
            })
            .unwrap();
            devices.claim(&next, &both).unwrap();
            released.join().unwrap().unwrap();
        });
    }
    devices.release(&format!("{:012}", 20)).unwrap();
}
