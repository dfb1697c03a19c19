//! A console over real pipes, sockets and files, driven by the conformance kit's driver.

use std::collections::HashMap;
use std::fs::File;
use std::io::{PipeReader, PipeWriter, Read, Seek, Write, pipe};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use device::{CreateError, DeviceContext, DeviceModule, FdTable};
use observe::Registry;
use virtio::VirtioDevice;
use virtio::conformance::driver::{Descriptor, Driver, PATIENCE, Pushed};
use virtio::conformance::{Request, Subject, run};
use vmm_api::{DeviceSpec, FdRef, devices::ConsoleConfig};

const RECEIVE: u16 = 0;
const TRANSMIT: u16 = 1;

fn create(
    input: Option<OwnedFd>,
    output: Option<OwnedFd>,
    metrics: &Registry,
) -> Result<Box<dyn VirtioDevice>, CreateError> {
    let mut fds = Vec::new();
    let mut give = |fd: Option<OwnedFd>| {
        fd.map(|fd| {
            fds.push(fd);
            FdRef(u32::try_from(fds.len() - 1).unwrap())
        })
    };
    let config = ConsoleConfig {
        input: give(input),
        output: give(output),
        keep: None,
    };
    let spec = DeviceSpec {
        id: "console0".into(),
        kind: "console".into(),
        config: serde_json::to_value(config).unwrap(),
    };
    let context = DeviceContext {
        id: "console0",
        metrics,
        no_space: &device::SpaceAlarm::new().unwrap(),
    };
    console::MODULE.create(&spec, &mut FdTable::new(fds), &context)
}

struct Guest {
    driver: Driver,
    metrics: Registry,
    buffers: HashMap<u16, Pushed>,
}

impl Guest {
    fn start(input: Option<OwnedFd>, output: Option<OwnedFd>) -> Self {
        let metrics = Registry::new();
        let mut driver = Driver::new(create(input, output, &metrics).unwrap());
        driver.start();
        Self {
            driver,
            metrics,
            buffers: HashMap::new(),
        }
    }

    fn metric(&self, name: &str) -> u64 {
        let samples = self.metrics.samples();
        samples.iter().filter(|s| s.name == name).map(|s| s.value).sum()
    }

    /// Prints and spins until the device has taken it, as a Linux guest does.
    #[track_caller]
    fn print(&mut self, bytes: &[u8]) {
        self.print_later(bytes);
        assert!(self.driver.wait_used(TRANSMIT).is_some(), "the guest hangs");
    }

    fn print_later(&mut self, bytes: &[u8]) {
        self.driver.push(TRANSMIT, &[bytes], &[]);
        self.driver.kick_if_wanted(TRANSMIT);
    }

    fn offer(&mut self, length: usize) {
        let pushed = self.driver.push(RECEIVE, &[], &[length]);
        self.buffers.insert(pushed.head, pushed);
        self.driver.kick_if_wanted(RECEIVE);
    }

    #[track_caller]
    fn typed(&mut self) -> Vec<u8> {
        let used = self.driver.wait_used(RECEIVE).expect("no input came");
        let pushed = self.buffers.remove(&used.head).unwrap();
        let mut bytes = self.driver.bytes(pushed.writable[0]);
        bytes.truncate(used.written as usize);
        bytes
    }

    fn quiet(&mut self) -> bool {
        std::thread::sleep(Duration::from_millis(20));
        self.driver.poll_used(RECEIVE).is_none()
    }
}

fn pipes() -> (Guest, PipeWriter, PipeReader) {
    let (input, keyboard) = pipe().unwrap();
    let (screen, output) = pipe().unwrap();
    (Guest::start(Some(input.into()), Some(output.into())), keyboard, screen)
}

/// Waits until the pipe is full: the device has taken so much of what was printed.
#[track_caller]
fn wait_for_a_full(screen: &PipeReader) {
    let began = Instant::now();
    while rustix::io::ioctl_fionread(screen).unwrap() < 65_536 {
        assert!(began.elapsed() < PATIENCE, "nothing is printed");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| ((at / 251) ^ at).to_le_bytes()[0]).collect()
}

#[test]
fn the_kit_finds_nothing() {
    let request = Request {
        queue: TRANSMIT,
        readable: b"a line of output\n".to_vec(),
        writable: 0,
    };
    let subject = Subject::new(
        || {
            let metrics = Registry::new();
            let sink = File::options().write(true).open("/dev/null").unwrap();
            let (input, keyboard) = pipe().unwrap();
            // Open for as long as the device lives.
            std::mem::forget(keyboard);
            create(Some(input.into()), Some(sink.into()), &metrics).unwrap()
        },
        request,
    );
    let count = run(&subject).unwrap();
    assert!(count > 10, "{count} checks");
}

#[test]
fn characters_go_both_ways() {
    let (mut guest, mut keyboard, mut screen) = pipes();
    guest.print(b"login: ");
    let mut text = [0; 7];
    screen.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"login: ");
    guest.offer(4096);
    keyboard.write_all(b"root\n").unwrap();
    assert_eq!(guest.typed(), b"root\n");
    assert_eq!(guest.metric("console_bytes_total"), 12);
}

#[test]
fn input_waits_for_buffers() {
    let (mut guest, mut keyboard, _screen) = pipes();
    let data = pattern(60_000);
    keyboard.write_all(&data).unwrap();
    assert!(guest.quiet());
    let mut all = Vec::new();
    while all.len() < data.len() {
        for length in [1, 1000, 4096] {
            guest.offer(length);
        }
        for _ in 0..3 {
            if all.len() < data.len() {
                all.extend(guest.typed());
            }
        }
    }
    assert!(all == data);
}

#[test]
fn the_end_of_input_is_not_the_end_of_output() {
    let (mut guest, mut keyboard, mut screen) = pipes();
    keyboard.write_all(b"exit").unwrap();
    drop(keyboard);
    guest.offer(100);
    guest.offer(100);
    assert_eq!(guest.typed(), b"exit");
    assert!(guest.quiet(), "an end is no input");
    guest.print(b"logout");
    let mut text = [0; 6];
    screen.read_exact(&mut text).unwrap();
    guest.driver.device().pause();
    guest.driver.device().resume().unwrap();
    assert!(guest.quiet());
}

#[test]
fn a_reader_that_is_slow_gets_everything() {
    let (mut guest, _keyboard, mut screen) = pipes();
    let data = pattern(300_000);
    let expected = data.clone();
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        let mut buffer = [0; 7001];
        while all.len() < 300_000 {
            std::thread::sleep(Duration::from_millis(3));
            let count = screen.read(&mut buffer).unwrap();
            all.extend_from_slice(&buffer[..count]);
        }
        all
    });
    // Larger than the pipe, so that some are written in part.
    guest.print(&data[..200_000]);
    for line in data[200_000..].chunks(80) {
        guest.print(line);
    }
    assert!(reader.join().unwrap() == expected);
    assert_eq!(guest.metric("console_dropped_bytes_total"), 0);
}

#[test]
fn a_reader_that_does_not_read_stops_the_guest_for_a_while_only() {
    let (mut guest, mut keyboard, mut screen) = pipes();
    let data = pattern(100_000);
    let began = Instant::now();
    // Not for ever: the driver's own patience has an end.
    guest.print(&data);
    assert!(began.elapsed() > Duration::from_secs(1), "it was waited for");
    let began = Instant::now();
    for _ in 0..100 {
        guest.print(&data);
    }
    // If each were waited for, it would be 200 seconds.
    assert!(
        began.elapsed() < Duration::from_secs(100),
        "from then on it is dropped at once"
    );
    // Input goes on meanwhile.
    guest.offer(10);
    keyboard.write_all(b"still here").unwrap();
    assert_eq!(guest.typed(), b"still here");
    // A reader that comes back sees what is printed from then on.
    let mut first = vec![0; 65_536];
    screen.read_exact(&mut first).unwrap();
    assert!(first == data[..65_536]);
    std::thread::sleep(Duration::from_millis(50));
    guest.print(b"hello again");
    let mut text = [0; 11];
    screen.read_exact(&mut text).unwrap();
    assert_eq!(&text, b"hello again");
    assert_eq!(guest.metric("console_dropped_bytes_total"), 101 * 100_000 - 65_536);
}

#[test]
fn what_was_taken_in_part_goes_on_in_the_restored_console() {
    let (mut guest, _keyboard, mut screen) = pipes();
    let data = pattern(100_000);
    guest.print_later(&data);
    guest.print_later(b"the end");
    wait_for_a_full(&screen);
    let (mut other_screen, output) = pipe().unwrap();
    let metrics = Registry::new();
    let other = create(None, Some(output.into()), &metrics).unwrap();
    guest.driver.migrate(other).unwrap();
    // The first has what it had taken; the other gets the rest, and what came later.
    let mut all = vec![0; 100_007];
    let taken = 65_536;
    screen.read_exact(&mut all[..taken]).unwrap();
    other_screen.read_exact(&mut all[taken..]).unwrap();
    assert!(all[..100_000] == data && &all[100_000..] == b"the end");
}

#[test]
fn stopping_does_not_wait_for_the_reader_and_loses_nothing() {
    let (mut guest, _keyboard, mut screen) = pipes();
    let data = pattern(100_000);
    guest.print_later(&data);
    guest.print_later(b"the end");
    wait_for_a_full(&screen);
    // One that waits for the reader takes two seconds every time, a busy machine does not.
    let quick = (0..10).any(|_| {
        guest.driver.device().resume().unwrap();
        let began = Instant::now();
        guest.driver.device().pause();
        began.elapsed() < Duration::from_secs(1)
    });
    assert!(quick, "a pause waits for nobody");
    assert_eq!(guest.metric("console_dropped_bytes_total"), 0);
    let mut all = vec![0; 100_007];
    screen.read_exact(&mut all[..1000]).unwrap();
    guest.driver.device().resume().unwrap();
    screen.read_exact(&mut all[1000..]).unwrap();
    assert!(all[..100_000] == data && &all[100_000..] == b"the end");
    assert!(guest.driver.wait_used(TRANSMIT).is_some());
    assert!(guest.driver.wait_used(TRANSMIT).is_some());
}

#[test]
fn a_reset_does_not_cut_what_was_being_written() {
    let (mut guest, _keyboard, mut screen) = pipes();
    let data = pattern(100_000);
    guest.print_later(&data);
    wait_for_a_full(&screen);
    guest.driver.start();
    guest.print_later(b"booting");
    let mut all = vec![0; 100_007];
    screen.read_exact(&mut all).unwrap();
    assert!(all[..100_000] == data && &all[100_000..] == b"booting");
}

#[test]
fn a_broken_ring_and_a_reset_leave_nothing_of_the_buffer_before() {
    let (mut guest, _keyboard, mut screen) = pipes();
    // Larger than the pipe: written in part when the ring breaks.
    guest.print_later(&pattern(100_000));
    wait_for_a_full(&screen);
    guest.driver.jump(TRANSMIT, 0x7000);
    guest.driver.kick(TRANSMIT);
    std::thread::sleep(Duration::from_millis(20));
    guest.driver.reset();
    screen.read_exact(&mut [0; 65_536]).unwrap();
    guest.driver.start();
    guest.print(b"booting");
    // Its end of the pipe closes.
    drop(guest);
    let mut text = String::new();
    screen.read_to_string(&mut text).unwrap();
    assert_eq!(text, "booting");
}

#[test]
fn a_reader_that_has_gone_is_not_missed() {
    let (mut guest, mut keyboard, screen) = pipes();
    guest.print(b"seen");
    drop(screen);
    for _ in 0..50 {
        guest.print(b"not seen");
    }
    assert_eq!(guest.metric("console_dropped_bytes_total"), 400);
    guest.offer(10);
    keyboard.write_all(b"x").unwrap();
    assert_eq!(guest.typed(), b"x");
}

#[test]
fn without_descriptors_it_swallows_and_says_nothing() {
    let mut guest = Guest::start(None, None);
    guest.print(b"into the void");
    guest.offer(10);
    assert!(guest.quiet());
    guest.driver.reset();
}

#[test]
fn files_and_sockets_do_as_well() {
    let mut log = tempfile();
    let mut script = tempfile();
    script.write_all(&pattern(10_000)).unwrap();
    script.rewind().unwrap();
    let output = log.try_clone().unwrap();
    let mut guest = Guest::start(Some(script.into()), Some(output.into()));
    for line in pattern(50_000).chunks(500) {
        guest.print(line);
    }
    let mut written = Vec::new();
    log.rewind().unwrap();
    log.read_to_end(&mut written).unwrap();
    assert!(written == pattern(50_000));
    let mut typed = Vec::new();
    while typed.len() < 10_000 {
        guest.offer(4096);
        typed.extend(guest.typed());
    }
    assert!(typed == pattern(10_000));
    guest.offer(4096);
    assert!(guest.quiet(), "the script has ended");

    let (mut host, socket) = UnixStream::pair().unwrap();
    let output = socket.try_clone().unwrap();
    let mut guest = Guest::start(Some(socket.into()), Some(output.into()));
    guest.print(b"ping");
    host.read_exact(&mut [0; 4]).unwrap();
    guest.offer(100);
    host.write_all(b"pong").unwrap();
    assert_eq!(guest.typed(), b"pong");
}

fn tempfile() -> File {
    let fd = rustix::fs::memfd_create("console-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    File::from(fd)
}

#[test]
fn a_guest_that_offers_all_its_memory_stops_nobody() {
    let (screen, output) = pipe().unwrap();
    let mut guest = Guest::start(None, Some(output.into()));
    let everything = Descriptor {
        address: 0,
        length: 60 << 20,
        flags: 0,
        next: 0,
    };
    for _ in 0..8 {
        guest.driver.push_chain(TRANSMIT, &[everything, everything]);
    }
    guest.driver.kick(TRANSMIT);
    let reader = std::thread::spawn(move || {
        let mut screen = screen;
        let mut buffer = vec![0; 1 << 20];
        let mut total = 0_u64;
        while let Ok(count) = screen.read(&mut buffer) {
            if count == 0 {
                break;
            }
            total += count as u64;
        }
        total
    });
    std::thread::sleep(Duration::from_millis(30));
    let began = Instant::now();
    guest.driver.device().pause();
    assert!(began.elapsed() < Duration::from_secs(100), "it stops in mid-buffer");
    drop(guest);
    assert!(reader.join().unwrap() > 0);
}
