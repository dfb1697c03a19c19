//! A driver that tells before it takes pages back: what is said of them to whoever maps for functions of the host's, and when it is answered.

use std::time::{Duration, Instant};

use super::*;
use crate::giving::MOST_DEFLATED;
use crate::worker::AGAIN;

fn guest(host: &Host) -> Guest {
    let registry = Registry::new();
    let made = created(serde_json::json!({"dma": {}}), host.clone(), &registry);
    let driver = Driver::new(made.device).with_queue_size(128);
    Guest {
        driver: driver.with_patience(Duration::from_secs(20)),
        resize: made.resize,
        registry,
    }
}

fn inflated(host: &Host) -> Vec<u64> {
    host.0.lock().unwrap().inflated.iter().copied().collect()
}

#[test]
fn it_has_to_tell_and_takes_nothing_back_by_itself() {
    let host = Host::new();
    let mut guest = guest(&host);
    let features = guest.driver.offered();
    assert_eq!(
        features & 0x25,
        0x21,
        "MUST_TELL_HOST, PAGE_REPORTING, and no DEFLATE_ON_OOM"
    );
    guest.driver.start();
    let beyond = u32::MAX;
    guest.name(INFLATE, &[9002, 9000, 9001, 9001, beyond, 0xe_0000]);
    assert_eq!(inflated(&host), [9000, 9001, 9002]);
    assert_eq!(host.given(), [(9000, 3)]);
    guest.name(DEFLATE, &[9001, 12, beyond]);
    assert_eq!(inflated(&host), [9000, 9002]);
}

#[test]
fn a_driver_that_need_not_tell_has_nothing_in_its_balloon() {
    let host = Host::new();
    let mut guest = guest(&host);
    guest.driver.start_with(!1);
    guest.name(INFLATE, &[9000]);
    assert_eq!((inflated(&host), host.given()), (vec![], vec![(9000, 1)]));
}

#[test]
fn what_cannot_be_mapped_is_not_answered_and_others_are() {
    let host = Host::new();
    let mut guest = guest(&host);
    guest.driver.start();
    guest.name(INFLATE, &[9000, 9001, 9002]);
    host.0.lock().unwrap().refuses = true;
    guest.driver.push(DEFLATE, &[&9001_u32.to_le_bytes()], &[]);
    guest.driver.kick(DEFLATE);
    guest.name(INFLATE, &[9500]);
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(guest.driver.poll_used(DEFLATE).map(|used| used.written), None);
    assert_eq!(inflated(&host), [9000, 9001, 9002, 9500]);
    host.0.lock().unwrap().refuses = false;
    let used = guest
        .driver
        .wait_used(DEFLATE)
        .expect("an answer, without another kick");
    assert_eq!((used.written, inflated(&host)), (0, vec![9000, 9002, 9500]));
    assert_eq!(guest.counted("balloon_requests_total", "deflate"), 1);
}

#[test]
fn with_a_reset_all_is_mapped_whether_or_not_another_driver_comes() {
    let host = Host::new();
    let mut guest = guest(&host);
    guest.driver.start();
    guest.name(INFLATE, &[9000, 9001, 9100]);
    guest.driver.reset();
    {
        let ledger = host.0.lock().unwrap();
        assert_eq!((ledger.inflated.len(), ledger.left), (0, 0));
        assert_eq!(ledger.settled_by.as_deref(), Some("balloon"));
    }
    guest.driver.start();
    guest.name(INFLATE, &[9000]);
    assert_eq!(inflated(&host), [9000]);
}

#[test]
fn a_new_driver_begins_with_nothing_and_is_served_when_all_is_mapped() {
    let host = Host::new();
    let mut guest = guest(&host);
    guest.driver.start();
    guest.name(INFLATE, &[9000, 9002]);
    host.0.lock().unwrap().refuses = true;
    guest.driver.reset();
    guest.driver.start();
    assert!(inflated(&host).is_empty());
    assert_eq!(host.0.lock().unwrap().left, 2);
    guest.driver.push(INFLATE, &[&9001_u32.to_le_bytes()], &[]);
    guest.driver.kick(INFLATE);
    std::thread::sleep(Duration::from_millis(60));
    assert!(
        guest.driver.poll_used(INFLATE).is_none(),
        "it is served before it has what it owns"
    );
    host.0.lock().unwrap().refuses = false;
    assert!(guest.driver.wait_used(INFLATE).is_some());
    assert_eq!(inflated(&host), [9001]);
}

#[test]
fn a_pause_forgets_nothing() {
    let host = Host::new();
    let mut guest = guest(&host);
    guest.driver.start();
    guest.name(INFLATE, &[9000, 9001]);
    let device = guest.driver.device();
    device.pause();
    device.resume().unwrap();
    guest.name(DEFLATE, &[9000]);
    assert_eq!(inflated(&host), [9001]);
}

#[test]
fn more_than_any_driver_names_is_not_answered() {
    let host = Host::new();
    let mut guest = guest(&host);
    guest.driver.start();
    guest.name(INFLATE, &[9000, 9001]);
    let before = host.0.lock().unwrap().deflations;
    guest.name(DEFLATE, &vec![9001; MOST_DEFLATED]);
    let deflations = host.0.lock().unwrap().deflations - before;
    assert_eq!(
        (inflated(&host), deflations),
        (vec![9000], 1),
        "they are asked for at once"
    );
    let numbers = vec![9000_u32; MOST_DEFLATED + 1];
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    guest.driver.push(DEFLATE, &[&bytes], &[]);
    guest.driver.kick(DEFLATE);
    std::thread::sleep(Duration::from_millis(60));
    assert!(guest.driver.poll_used(DEFLATE).is_none());
    assert_eq!(inflated(&host), [9000]);
    const { assert!(MOST_DEFLATED >= 256, "as many as Linux names at once") };
}

#[test]
fn what_waits_for_the_host_is_tried_at_times_and_holds_up_nothing_else() {
    let host = Host::new();
    let mut guest = guest(&host);
    guest.driver.start();
    guest.name(INFLATE, &[9000]);
    host.0.lock().unwrap().refuses = true;
    guest.driver.push(DEFLATE, &[&9000_u32.to_le_bytes()], &[]);
    guest.driver.kick(DEFLATE);
    let begun = Instant::now();
    for number in 0..120_u32 {
        guest.driver.push(INFLATE, &[&(9001 + number).to_le_bytes()], &[]);
    }
    guest.driver.kick(INFLATE);
    for _ in 0..120 {
        assert!(guest.driver.wait_used(INFLATE).is_some());
    }
    let took = begun.elapsed();
    assert!(took < 100 * AGAIN, "each of them waits for the host: {took:?}");
    std::thread::sleep(5 * AGAIN);
    let tried = host.0.lock().unwrap().deflations;
    let most = begun.elapsed().as_millis() / AGAIN.as_millis() + 2;
    assert!(
        (2..=most).contains(&u128::from(tried)),
        "{tried} times, and {most} at most"
    );
}
