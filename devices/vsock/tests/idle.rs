//! Waiting costs no processor time, whatever is waited for. One test, as it measures the threads of its process.

mod guest;

use std::io::Write;
use std::net::Shutdown;

use guest::{Guest, Packet, RW, pattern};
use virtio::conformance::process;

#[track_caller]
fn rests(guest: &mut Guest, what: &str) {
    guest.settle();
    process::rests("vsock", what).unwrap();
}

#[test]
fn waiting_is_free() {
    let mut guest = Guest::start();
    rests(&mut guest, "nothing to do");

    let (idle, mut host) = guest.dial(1, 100);
    guest.streams.get_mut(&idle).unwrap().reading = false;
    host.write_all(&pattern(5000, 1)).unwrap();
    rests(&mut guest, "bytes without credit");
    host.shutdown(Shutdown::Write).unwrap();
    rests(&mut guest, "an end behind bytes without credit");
    drop(host);
    rests(&mut guest, "a hang-up behind bytes without credit");

    let (half, host) = guest.dial(2, 4096);
    host.shutdown(Shutdown::Write).unwrap();
    guest.wait("the end", |guest| guest.streams[&half].shut == 2);
    rests(&mut guest, "a stream that the host has ended");
    let (other, _deaf) = guest.dial(3, 4096);
    guest.shut(other, 1);
    rests(&mut guest, "a stream that the guest does not read");

    let (stuck, _reader) = guest.dial(4, 4096);
    while guest.streams[&stuck].credit() > 0 {
        let count = guest.streams[&stuck].credit().min(60_000) as usize;
        guest.send_data(stuck, &pattern(count, 2));
        guest.settle();
    }
    rests(&mut guest, "a host that does not read");

    let mut silent = guest.host_connects();
    silent.write_all(b"CONN").unwrap();
    rests(&mut guest, "a first line that does not end");

    let (starved, mut host) = guest.dial(5, 1 << 20);
    guest.refill = false;
    while guest.driver.free_descriptors(0) < 128 {
        host.write_all(&pattern(4000, 3)).unwrap();
        guest.settle();
    }
    host.write_all(&pattern(4000, 3)).unwrap();
    rests(&mut guest, "no receive buffers");
    drop(host);
    rests(&mut guest, "no receive buffers, and a hang-up");
    for port in 0..1000 {
        guest.driver.push(1, &[&Packet::new(RW, 1, port).bytes()], &[]);
        guest.driver.kick_if_wanted(1);
        if guest.driver.free_descriptors(1) == 0 {
            guest.settle();
        }
        if guest.driver.free_descriptors(1) == 0 {
            break;
        }
    }
    rests(&mut guest, "no receive buffers, and more to refuse than is held");

    guest.refill = true;
    guest.fill();
    guest.wait("what had waited", |guest| guest.streams[&starved].shut == 3);
}
