//! The checks with a well-behaved driver.

use super::driver::{Driver, Pushed};
use super::{Outcome, Request, Subject};
use crate::device::DeviceError;
use crate::transport::TransportError;

type Check = fn(&Subject) -> Outcome;

/// All of them, by name.
pub(super) const ALL: &[(&str, Check)] = &[
    ("it describes itself", describes_itself),
    ("configuration of any offset and width", configuration),
    ("an idle device has no queues to give back", idle),
    ("queues come back", queues_come_back),
    ("a request is completed", request),
    ("a request without event indices", request_without_event_index),
    ("buffers made available before the start", early_buffers),
    ("no kick is lost", kicks),
    ("pause and resume", pause),
    ("saved and restored", saved),
    ("reset and start again", restart),
    ("reset with requests under way", reset_under_way),
];

fn expect(holds: bool, what: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(what()) }
}

fn describes_itself(subject: &Subject) -> Outcome {
    let device = (subject.make)();
    expect(device.device_type() != 0, || "device type 0 is reserved".to_owned())?;
    expect(!device.queue_sizes().is_empty(), || "it has no queue".to_owned())?;
    for &size in device.queue_sizes() {
        expect(size.is_power_of_two() && size <= 32768, || {
            format!("{size} is no queue size (2.7)")
        })?;
    }
    Ok(())
}

fn configuration(subject: &Subject) -> Outcome {
    const OFFSETS: [usize; 14] = [0, 1, 2, 3, 4, 7, 8, 20, 59, 60, 63, 64, 4095, usize::MAX];
    let mut device = (subject.make)();
    for offset in OFFSETS {
        for width in [1, 2, 3, 4, 8] {
            device.read_config(offset, &mut [0; 8][..width]);
            device.write_config(offset, &[0xff; 8][..width]);
        }
    }
    let (mut driver, _) = subject.driver();
    driver.start();
    for offset in 0..256 {
        for width in [1, 2, 4, 8] {
            driver.config(offset, width);
        }
    }
    // A 32-bit read is what its four bytes are.
    for offset in (0..64).step_by(4) {
        let word = driver.config(offset, 4);
        let bytes = (0..4).fold(0, |sum, at| sum | driver.config(offset + at, 1) << (8 * at));
        expect(word == bytes, || {
            format!("at {offset} a 32-bit read gives {word:#x}, its bytes give {bytes:#x}")
        })?;
    }
    Ok(())
}

fn idle(subject: &Subject) -> Outcome {
    let mut device = (subject.make)();
    let queues = device.deactivate();
    expect(queues.is_empty(), || format!("it gave back {} queues", queues.len()))
}

fn queues_come_back(subject: &Subject) -> Outcome {
    let (mut driver, log) = subject.driver();
    for _ in 0..3 {
        driver.start();
        driver.reset();
        log.verdict()?;
    }
    expect(log.stops() == 3, || {
        format!("it was stopped {} times instead of 3", log.stops())
    })
}

/// Pushes the subject's request.
pub(super) fn push(driver: &mut Driver, request: &Request) -> Pushed {
    let readable: &[&[u8]] = &[&request.readable];
    let readable = if request.readable.is_empty() { &[] } else { readable };
    let writable: &[usize] = &[request.writable];
    let writable = if request.writable == 0 { &[] } else { writable };
    driver.push(request.queue, readable, writable)
}

/// Waits for a request that was pushed, and looks at what the device made of it.
fn complete(driver: &mut Driver, request: &Request, pushed: &Pushed) -> Outcome {
    let used = driver
        .wait_used(request.queue)
        .ok_or_else(|| "the request was not completed".to_owned())?;
    expect(used.written as usize <= request.writable, || {
        format!(
            "{} bytes are said to be written into {}",
            used.written, request.writable
        )
    })?;
    expect(used.head == pushed.head, || {
        format!("descriptor {} came back instead of {}", used.head, pushed.head)
    })?;
    let read: Vec<u8> = pushed
        .readable
        .iter()
        .flat_map(|&buffer| driver.bytes(buffer))
        .collect();
    expect(read == request.readable, || {
        "it wrote into what it may only read".to_owned()
    })
}

/// One request from push to completion.
pub(super) fn one_request(driver: &mut Driver, request: &Request) -> Outcome {
    let pushed = push(driver, request);
    driver.kick(request.queue);
    complete(driver, request, &pushed)
}

fn request(subject: &Subject) -> Outcome {
    let Some(request) = &subject.request else {
        return Ok(());
    };
    let (mut driver, log) = subject.driver();
    driver.start();
    // More than the ring has entries, so that its indices wrap around.
    for _ in 0..3 * driver.ring_size(request.queue) {
        one_request(&mut driver, request)?;
    }
    let interrupted = driver.wait_until(|driver| driver.interrupts(request.queue) > 0);
    expect(interrupted, || "no interrupt came".to_owned())?;
    driver.reset();
    log.verdict()
}

fn request_without_event_index(subject: &Subject) -> Outcome {
    let Some(request) = &subject.request else {
        return Ok(());
    };
    let (mut driver, log) = subject.driver();
    // Only VERSION_1, which every driver accepts.
    driver.start_with(0);
    for _ in 0..20 {
        one_request(&mut driver, request)?;
    }
    driver.reset();
    log.verdict()
}

fn early_buffers(subject: &Subject) -> Outcome {
    let Some(request) = &subject.request else {
        return Ok(());
    };
    let (mut driver, log) = subject.driver();
    driver.negotiate(u64::MAX);
    driver.set_up_queues();
    let pushed = push(&mut driver, request);
    driver.go();
    complete(&mut driver, request, &pushed)?;
    driver.reset();
    log.verdict()
}

fn kicks(subject: &Subject) -> Outcome {
    let Some(request) = &subject.request else {
        return Ok(());
    };
    for features in [u64::MAX, 0] {
        let (mut driver, log) = subject.driver();
        driver.start_with(features);
        for _ in 0..200 {
            let pushed = push(&mut driver, request);
            driver.kick_if_wanted(request.queue);
            complete(&mut driver, request, &pushed)?;
        }
        driver.reset();
        log.verdict()?;
    }
    Ok(())
}

fn pause(subject: &Subject) -> Outcome {
    let (mut driver, log) = subject.driver();
    driver.start();
    for _ in 0..3 {
        if let Some(request) = &subject.request {
            one_request(&mut driver, request)?;
        }
        driver.device().pause();
        log.verdict()?;
        // A second pause changes nothing.
        driver.device().pause();
        let pushed = subject.request.as_ref().map(|request| {
            let pushed = push(&mut driver, request);
            driver.kick(request.queue);
            (request, pushed)
        });
        driver
            .device()
            .resume()
            .map_err(|error| format!("it does not resume: {error}"))?;
        if let Some((request, pushed)) = pushed {
            complete(&mut driver, request, &pushed)?;
        }
    }
    driver.device().pause();
    driver.reset();
    driver
        .device()
        .resume()
        .map_err(|error| format!("it does not resume: {error}"))?;
    expect(driver.status() == 0, || "it resumes after a reset".to_owned())?;
    log.verdict()
}

/// A device that has a saved form goes on in another that was just made: with a request that came before, or with a kick
/// that nobody has seen.
fn saved(subject: &Subject) -> Outcome {
    let (mut driver, log) = subject.driver();
    let move_on = |driver: &mut Driver| {
        let moved = match driver.migrate((subject.make)()) {
            // One that has no saved form, or none any more, goes on as if nobody had asked.
            Err(TransportError::Device(DeviceError::NotSaved)) => driver.device().resume().map_err(Into::into),
            moved => moved,
        };
        moved.map_err(|error| format!("it does not go on in another: {error}"))
    };
    // Before its driver has come.
    move_on(&mut driver)?;
    driver.start();
    log.verdict()?;
    for round in 0..6_u64 {
        if let Some(request) = &subject.request {
            one_request(&mut driver, request)?;
            let pushed = push(&mut driver, request);
            if round % 2 == 0 {
                driver.kick(request.queue);
                // Sometimes before the device has begun, sometimes in the middle.
                std::thread::sleep(std::time::Duration::from_micros(round * 50));
            }
            move_on(&mut driver)?;
            complete(&mut driver, request, &pushed)?;
        } else {
            move_on(&mut driver)?;
        }
        expect(driver.status() == 0xf, || "its driver has to start anew".to_owned())?;
    }
    // What was saved has not taken it out of its driver's hands.
    driver.start();
    match &subject.request {
        Some(request) => one_request(&mut driver, request),
        None => Ok(()),
    }
}

fn restart(subject: &Subject) -> Outcome {
    let (mut driver, log) = subject.driver();
    for _ in 0..5 {
        driver.start();
        if let Some(request) = &subject.request {
            one_request(&mut driver, request)?;
        }
        driver.reset();
        log.verdict()?;
    }
    Ok(())
}

fn reset_under_way(subject: &Subject) -> Outcome {
    let Some(request) = &subject.request else {
        return Ok(());
    };
    let (mut driver, log) = subject.driver();
    for round in 0..20_u64 {
        driver.start();
        while driver.free_descriptors(request.queue) >= 2 {
            push(&mut driver, request);
        }
        driver.kick(request.queue);
        // Sometimes before the device has begun, sometimes in the middle.
        std::thread::sleep(std::time::Duration::from_micros(round * 20));
        driver.reset();
        log.verdict()?;
    }
    driver.start();
    one_request(&mut driver, request)
}
