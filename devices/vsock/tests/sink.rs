//! Ports that end in a file.

mod guest;

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};

use guest::{Guest, SINK, pattern};

const ALLOC: u32 = 64 << 10;

fn file() -> (File, File) {
    let file = tempfile::tempfile().unwrap();
    let flags = rustix::fs::fcntl_getfl(&file).unwrap();
    rustix::fs::fcntl_setfl(&file, flags | rustix::fs::OFlags::APPEND).unwrap();
    (file.try_clone().unwrap(), file)
}

#[test]
fn all_of_it_is_in_the_file_when_the_host_shuts_down() {
    let (ours, theirs) = file();
    let mut guest = Guest::start_with_sink(theirs, 1 << 20);
    // Nobody accepts connections: a sink needs nobody.
    guest.acceptor = None;
    let data = pattern(300_000, 7);
    for half in [&data[..123_457], &data[123_457..]] {
        let ports = guest.request(SINK, ALLOC);
        guest.wait("the answer", |guest| guest.streams[&ports].connected);
        guest.send_all(ports, half, 9000);
        guest.shut(ports, 2);
        guest.wait("the host's shutdown", |guest| guest.streams[&ports].shut == 3);
        guest.shut(ports, 3);
        guest.wait("the end", |guest| guest.streams[&ports].reset);
    }
    let mut found = vec![0; data.len()];
    ours.read_exact_at(&mut found, 0).unwrap();
    assert!(found == data);
    assert_eq!(ours.metadata().unwrap().len(), data.len() as u64);
}

#[test]
fn a_guest_cannot_fill_the_disk() {
    let (ours, theirs) = file();
    let mut guest = Guest::start_with_sink(theirs, 64 << 10);
    let ports = guest.request(SINK, ALLOC);
    guest.wait("the answer", |guest| guest.streams[&ports].connected);
    let data = pattern(1 << 20, 3);
    guest.send_all(ports, &data, 9000);
    guest.shut(ports, 2);
    guest.wait("the host's shutdown", |guest| guest.streams[&ports].shut == 3);
    let metadata = ours.metadata().unwrap();
    assert_eq!(metadata.len(), data.len() as u64);
    assert!(metadata.blocks() * 512 <= 96 << 10, "{} blocks", metadata.blocks());
    let mut end = vec![0; 64 << 10];
    ours.read_exact_at(&mut end, (data.len() - (64 << 10)) as u64).unwrap();
    assert!(data.ends_with(&end));
}

#[test]
fn a_file_that_takes_nothing_ends_the_connection_and_nothing_else() {
    let full = File::options().append(true).open("/dev/full").unwrap();
    let mut guest = Guest::start_with_sink(full, 64 << 10);
    let ports = guest.request(SINK, ALLOC);
    guest.wait("the answer", |guest| guest.streams[&ports].connected);
    guest.send_data(ports, b"lost");
    guest.wait("the host's shutdown", |guest| guest.streams[&ports].shut == 3);
    let (other, _socket) = guest.dial(1024, ALLOC);
    assert!(guest.streams[&other].connected);
}
