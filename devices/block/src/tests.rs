//! A disk behind the real transport, driven by the conformance kit's driver: both engines, the same expectations.

mod rates;
mod space;

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use ::device::{CreateError, DeviceContext, DeviceModule, FdTable, SpaceAlarm};
use observe::Registry;
use virtio::VirtioDevice;
use virtio::conformance::driver::{Driver, Pushed};
use virtio::conformance::{Request, Subject, run};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use vmm_api::devices::{BlockConfig, BlockEngine, BlockLimits};
use vmm_api::{DeviceSpec, FdRef};

use crate::MODULE;
use crate::device::BlockState;
use crate::disk::SERIAL_BYTES;

const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

const ENGINES: [BlockEngine; 2] = [BlockEngine::IoUring, BlockEngine::Threads];

/// A file without a name, on the file system of the build.
fn file(bytes: u64) -> File {
    let path = std::env::temp_dir().join(format!(
        "basalt-block-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    std::fs::remove_file(&path).unwrap();
    file.set_len(bytes).unwrap();
    file
}

fn config() -> BlockConfig {
    BlockConfig {
        file: FdRef(0),
        read_only: false,
        queues: 1,
        serial: "disk-7".to_owned(),
        engine: BlockEngine::Auto,
        limits: BlockLimits::default(),
    }
}

fn create(file: &File, config: &BlockConfig) -> Result<Box<dyn VirtioDevice>, CreateError> {
    create_counted(file, config, &Registry::new())
}

fn create_counted(file: &File, config: &BlockConfig, metrics: &Registry) -> Result<Box<dyn VirtioDevice>, CreateError> {
    create_with(file, config, (metrics, &SpaceAlarm::new().unwrap()))
}

fn create_with(
    file: &File,
    config: &BlockConfig,
    (metrics, no_space): (&Registry, &SpaceAlarm),
) -> Result<Box<dyn VirtioDevice>, CreateError> {
    let spec = DeviceSpec::new("disk", config).unwrap();
    let mut fds = FdTable::new(vec![OwnedFd::from(file.try_clone().unwrap())]);
    let context = DeviceContext {
        id: "disk",
        metrics,
        no_space,
    };
    MODULE.create(&spec, &mut fds, &context)
}

fn driver(file: &File, engine: BlockEngine) -> Driver {
    let config = BlockConfig { engine, ..config() };
    let mut driver = Driver::new(create(file, &config).unwrap()).with_queue_size(256);
    driver.start();
    driver
}

fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut header = kind.to_le_bytes().to_vec();
    header.extend([0; 4]);
    header.extend(sector.to_le_bytes());
    header
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut range = sector.to_le_bytes().to_vec();
    range.extend(sectors.to_le_bytes());
    range.extend(flags.to_le_bytes());
    range
}

/// The answer to one request: status, data, and what the used ring says was written.
fn answer(driver: &mut Driver, queue: u16, pushed: &Pushed) -> (u8, Vec<u8>, u32) {
    let used = driver.wait_used(queue).expect("an answer");
    assert_eq!(used.head, pushed.head);
    let mut data: Vec<u8> = pushed
        .writable
        .iter()
        .flat_map(|&buffer| driver.bytes(buffer))
        .collect();
    let status = data.pop().unwrap();
    (status, data, used.written)
}

fn ask(driver: &mut Driver, readable: &[&[u8]], writable: &[usize]) -> (u8, Vec<u8>, u32) {
    let pushed = driver.push(0, readable, writable);
    driver.kick(0);
    answer(driver, 0, &pushed)
}

fn read(driver: &mut Driver, sector: u64, length: usize) -> (u8, Vec<u8>) {
    let (status, data, _) = ask(driver, &[&header(VIRTIO_BLK_T_IN, sector)], &[length, 1]);
    (status, data)
}

fn write(driver: &mut Driver, sector: u64, data: &[u8]) -> u8 {
    ask(driver, &[&header(VIRTIO_BLK_T_OUT, sector), data], &[1]).0
}

fn pattern(seed: usize, length: usize) -> Vec<u8> {
    (0..length)
        .map(|at| u8::try_from((at * 31 + seed * 7 + at / 512) % 251).unwrap())
        .collect()
}

#[test]
fn it_conforms() {
    for engine in ENGINES {
        for queues in [1, 3] {
            let file = file(1 << 20);
            let make = move || {
                create(
                    &file,
                    &BlockConfig {
                        engine,
                        queues,
                        ..config()
                    },
                )
                .unwrap()
            };
            let request = Request {
                queue: queues - 1,
                readable: header(VIRTIO_BLK_T_IN, 3),
                writable: 4097,
            };
            run(&Subject::new(make, request)).unwrap_or_else(|failure| panic!("{engine:?}: {failure}"));
        }
    }
}

#[test]
fn what_is_written_is_read_and_in_the_file() {
    for engine in ENGINES {
        let mut file = file(1 << 20);
        let mut driver = driver(&file, engine);
        let data = pattern(1, 8192);
        assert_eq!(write(&mut driver, 5, &data), OK);
        assert_eq!(read(&mut driver, 5, 8192), (OK, data.clone()));
        let mut on_disk = vec![0; 8192];
        file.seek(SeekFrom::Start(5 * 512)).unwrap();
        file.read_exact(&mut on_disk).unwrap();
        assert_eq!(on_disk, data);
        let (_, _, written) = ask(&mut driver, &[&header(VIRTIO_BLK_T_IN, 0)], &[512, 1]);
        assert_eq!(written, 513);
        assert!(driver.wait_until(|driver| driver.interrupts(0) > 0));
    }
}

#[test]
fn buffers_may_be_cut_anywhere() {
    for engine in ENGINES {
        let mut driver = driver(&file(1 << 20), engine);
        let data = pattern(2, 1536);
        let mut whole = header(VIRTIO_BLK_T_OUT, 9);
        whole.extend(&data);
        // Header and data in three buffers that are cut in the header and within a sector.
        let (status, _, _) = ask(&mut driver, &[&whole[..7], &whole[7..100], &whole[100..]], &[1]);
        assert_eq!(status, OK);
        // Data and status share the last buffer.
        let (status, read, written) = ask(
            &mut driver,
            &[&header(VIRTIO_BLK_T_IN, 9)],
            &[13, 1000, 1536 - 1013 + 1],
        );
        assert_eq!((status, written), (OK, 1537));
        assert_eq!(read, data);
    }
}

#[test]
fn a_full_queue_of_requests_is_answered() {
    for engine in ENGINES {
        let mut driver = driver(&file(8 << 20), engine);
        for at in 0..64_usize {
            assert_eq!(write(&mut driver, 8 * at as u64, &pattern(at, 4096)), OK);
        }
        let before = driver.interrupts(0);
        let mut pushed: Vec<Pushed> = (0..64_u64)
            .map(|at| driver.push(0, &[&header(VIRTIO_BLK_T_IN, 8 * at)], &[4096, 1]))
            .collect();
        driver.kick(0);
        for _ in 0..64 {
            let used = driver.wait_used(0).unwrap();
            let at = pushed.iter().position(|pushed| pushed.head == used.head).unwrap();
            let request = pushed.swap_remove(at);
            let data = driver.bytes(request.writable[0]);
            let number = (0..64).find(|&number| data == pattern(number, 4096));
            assert!(number.is_some(), "{engine:?}: a request got another's data");
            assert_eq!(driver.bytes(request.writable[1]), [OK]);
        }
        assert!(driver.interrupts(0) - before <= 64);
    }
}

#[test]
fn what_is_out_of_range_or_unaligned_is_an_error() {
    for engine in ENGINES {
        let file = file(64 << 10);
        let mut driver = driver(&file, engine);
        for (sector, length) in [
            (128, 512),
            (127, 1024),
            (u64::MAX, 512),
            (1 << 55, 512),
            (0, 511),
            (0, 513),
        ] {
            assert_eq!(read(&mut driver, sector, length).0, IO_ERROR, "{sector} {length}");
            assert_eq!(
                write(&mut driver, sector, &vec![1; length]),
                IO_ERROR,
                "{sector} {length}"
            );
        }
        assert_eq!(read(&mut driver, 127, 512).0, OK);
        assert_eq!(read(&mut driver, 128, 0).0, OK, "nothing at the end is nothing");
        assert_eq!(file.metadata().unwrap().len(), 64 << 10);
        assert_eq!(ask(&mut driver, &[&header(77, 0)], &[1]).0, UNSUPPORTED);
    }
}

#[test]
fn a_request_without_header_or_status_is_given_back() {
    for engine in ENGINES {
        let mut driver = driver(&file(64 << 10), engine);
        for (readable, writable) in [(vec![0; 8], vec![512, 1]), (header(VIRTIO_BLK_T_OUT, 0), vec![])] {
            driver.push(0, &[&readable], &writable);
            driver.kick(0);
            assert_eq!(driver.wait_used(0).unwrap().written, 0);
        }
        assert_eq!(read(&mut driver, 0, 512).0, OK);
    }
}

#[test]
fn a_file_that_became_shorter_is_an_error() {
    for engine in ENGINES {
        let file = file(64 << 10);
        let mut driver = driver(&file, engine);
        file.set_len(6 << 9).unwrap();
        assert_eq!(read(&mut driver, 4, 2048).0, IO_ERROR);
        assert_eq!(read(&mut driver, 4, 1024).0, OK);
    }
}

#[test]
fn a_read_only_disk_is_not_written() {
    for engine in ENGINES {
        let mut file = file(64 << 10);
        file.write_all(&[7; 512]).unwrap();
        let read_only = BlockConfig {
            read_only: true,
            engine,
            ..config()
        };
        let mut driver = Driver::new(create(&file, &read_only).unwrap());
        assert_eq!(driver.offered() >> VIRTIO_BLK_F_RO & 1, 1);
        assert_eq!(
            driver.offered() & (1 << VIRTIO_BLK_F_FLUSH | 1 << VIRTIO_BLK_F_DISCARD),
            0
        );
        driver.start();
        assert_eq!(write(&mut driver, 0, &[1; 512]), IO_ERROR);
        let discard = [&header(VIRTIO_BLK_T_DISCARD, 0)[..], &range(0, 8, 0)];
        assert_eq!(ask(&mut driver, &discard, &[1]).0, IO_ERROR);
        assert_eq!(read(&mut driver, 0, 512), (OK, vec![7; 512]));
    }
}

#[test]
fn flush_and_serial() {
    for engine in ENGINES {
        let mut driver = driver(&file(64 << 10), engine);
        assert_eq!(ask(&mut driver, &[&header(VIRTIO_BLK_T_FLUSH, 0)], &[1]).0, OK);
        let (status, serial, written) = ask(&mut driver, &[&header(VIRTIO_BLK_T_GET_ID, 0)], &[20, 1]);
        assert_eq!((status, written), (OK, 21));
        assert_eq!(serial, b"disk-7\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        let (status, serial, _) = ask(&mut driver, &[&header(VIRTIO_BLK_T_GET_ID, 0)], &[4, 1]);
        assert_eq!((status, &serial[..]), (OK, &b"disk"[..]));
    }
}

#[test]
fn writes_are_durable_for_a_driver_without_flush() {
    for engine in ENGINES {
        let config = BlockConfig { engine, ..config() };
        let mut driver = Driver::new(create(&file(64 << 10), &config).unwrap());
        driver.start_with(!(1 << VIRTIO_BLK_F_FLUSH));
        assert_eq!(write(&mut driver, 0, &pattern(3, 4096)), OK);
        assert_eq!(read(&mut driver, 0, 4096), (OK, pattern(3, 4096)));
    }
}

#[test]
fn discard_makes_holes_and_write_zeroes_makes_zeroes() {
    for engine in ENGINES {
        let file = file(1 << 20);
        let mut driver = driver(&file, engine);
        let data = pattern(4, 64 << 10);
        assert_eq!(write(&mut driver, 0, &data), OK);
        assert_eq!(ask(&mut driver, &[&header(VIRTIO_BLK_T_FLUSH, 0)], &[1]).0, OK);
        let before = file.metadata().unwrap().blocks();
        let mut change = |kind, range: Vec<u8>| ask(&mut driver, &[&header(kind, 0)[..], &range], &[1]).0;
        assert_eq!(change(VIRTIO_BLK_T_DISCARD, range(64, 64, 0)), OK);
        assert!(file.metadata().unwrap().blocks() < before, "no space was given back");
        assert_eq!(change(VIRTIO_BLK_T_WRITE_ZEROES, range(8, 8, 1)), OK);
        // Not every file system can zero without a hole; those that cannot say so, and drivers write then.
        let zeroed = change(VIRTIO_BLK_T_WRITE_ZEROES, range(16, 8, 0));
        assert!(zeroed == OK || zeroed == UNSUPPORTED, "{zeroed}");
        let mut expected = data;
        expected[32 << 10..].fill(0);
        expected[4096..8192].fill(0);
        if zeroed == OK {
            expected[8192..12288].fill(0);
        }
        assert_eq!(read(&mut driver, 0, 64 << 10), (OK, expected));
        let mut change = |kind, range: Vec<u8>| ask(&mut driver, &[&header(kind, 0)[..], &range], &[1]).0;
        assert_eq!(
            change(VIRTIO_BLK_T_DISCARD, range(0, 8, 1)),
            UNSUPPORTED,
            "unmap is of write zeroes"
        );
        assert_eq!(change(VIRTIO_BLK_T_WRITE_ZEROES, range(0, 8, 2)), UNSUPPORTED);
        assert_eq!(change(VIRTIO_BLK_T_DISCARD, range(0, 0, 0)), OK);
        for bad in [
            range(2047, 2, 0),
            range(u64::MAX, 1, 0),
            range(0, u32::MAX, 0),
            vec![0; 15],
            vec![0; 32],
            vec![],
        ] {
            assert_eq!(change(VIRTIO_BLK_T_DISCARD, bad.clone()), IO_ERROR, "{bad:?}");
        }
        assert_eq!(file.metadata().unwrap().len(), 1 << 20);
    }
}

#[test]
fn queues_work_side_by_side() {
    for engine in ENGINES {
        let file = file(1 << 20);
        let config = BlockConfig {
            queues: 4,
            engine,
            ..config()
        };
        let mut driver = Driver::new(create(&file, &config).unwrap());
        assert_eq!(driver.offered() >> VIRTIO_BLK_F_MQ & 1, 1);
        driver.start();
        assert_eq!(driver.config(34, 2), 4);
        for round in 0..8_usize {
            let pushed: Vec<Pushed> = (0..4_u16)
                .map(|queue| {
                    let sector = u64::from(queue) * 8;
                    let data = pattern(round + usize::from(queue), 4096);
                    driver.push(queue, &[&header(VIRTIO_BLK_T_OUT, sector), &data], &[1])
                })
                .collect();
            for queue in 0..4 {
                driver.kick(queue);
            }
            for (queue, pushed) in (0..4).zip(&pushed) {
                assert_eq!(answer(&mut driver, queue, pushed).0, OK);
            }
            for queue in 0..4_usize {
                assert_eq!(
                    read(&mut driver, queue as u64 * 8, 4096).1,
                    pattern(round + queue, 4096)
                );
            }
        }
    }
}

#[test]
fn the_configuration_tells_the_disk() {
    let driver = driver(&file(3 << 20), BlockEngine::Auto);
    assert_eq!(driver.config(0, 8), 3 << 11);
    assert_eq!(driver.config(12, 4), 254);
    assert_eq!(driver.config(20, 4), 512);
    assert_eq!(driver.config(24, 1), 3);
    assert_eq!(driver.config(34, 2), 1);
    assert_eq!(driver.config(36, 4), 1 << 21);
    assert_eq!(driver.config(56, 1), 1);
    assert_eq!(driver.config(60, 4), 0);
}

#[test]
fn what_cannot_be_a_disk_is_refused() {
    let good = file(64 << 10);
    let refused = |file: &File, config: &BlockConfig| create(file, config).err().expect("a refusal").to_string();
    assert!(refused(&file(513), &config()).contains("513 bytes"));
    for queues in [0, 17] {
        assert!(refused(&good, &BlockConfig { queues, ..config() }).contains("1 to 16"));
    }
    for serial in ["123456789012345678901", "tab\there", "ümlaut"] {
        let config = BlockConfig {
            serial: serial.to_owned(),
            ..config()
        };
        assert!(refused(&good, &config).contains("serial number"), "{serial}");
    }
    let null = File::open("/dev/null").unwrap();
    assert!(refused(&null, &config()).contains("neither a regular file"));
    let executable = File::open(std::env::current_exe().unwrap()).unwrap();
    assert!(refused(&executable, &config()).contains("reading and writing"));
    let missing = BlockConfig {
        file: FdRef(1),
        ..config()
    };
    assert!(refused(&good, &missing).contains("descriptor 1"));
}

#[test]
fn requests_are_counted() {
    let metrics = Registry::new();
    let mut driver = Driver::new(create_counted(&file(64 << 10), &config(), &metrics).unwrap());
    driver.start();
    assert_eq!(write(&mut driver, 0, &[1; 1024]), OK);
    assert_eq!(read(&mut driver, 0, 512).0, OK);
    assert_eq!(read(&mut driver, 999, 512).0, IO_ERROR);
    let value = |name: &str, label: &str| -> u64 {
        let samples = metrics.samples();
        let matching = samples
            .iter()
            .filter(|sample| sample.name == name && sample.labels.iter().any(|(_, value)| value == label));
        matching.map(|sample| sample.value).sum()
    };
    assert_eq!(value("block_requests_total", "read"), 2);
    assert_eq!(value("block_requests_total", "write"), 1);
    assert_eq!(value("block_bytes_total", "write"), 1024);
    assert_eq!(value("block_bytes_total", "read"), 512);
    assert_eq!(value("block_errors_total", "disk"), 1);
}

/// A small generator (xorshift64*, Vigna 2016), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let value = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % bound as u64;
        usize::try_from(value).unwrap()
    }
}

#[test]
fn any_sequence_does_what_a_vector_would() {
    const SECTORS: usize = 256;
    for engine in ENGINES {
        for seed in 1..4 {
            let mut random = Random(seed);
            let mut driver = driver(&file(SECTORS as u64 * 512), engine);
            let mut model = vec![0_u8; SECTORS * 512];
            for step in 0..400_usize {
                let (first, sectors) = (random.below(SECTORS + 4), random.below(20));
                let (start, length) = (first * 512, sectors * 512);
                let sector = first as u64;
                let fits = start + length <= model.len();
                let expected = if fits { OK } else { IO_ERROR };
                let context = format!("{engine:?} seed {seed} step {step}: {sector}+{sectors}");
                match random.below(5) {
                    0 | 1 => {
                        let (status, data) = read(&mut driver, sector, length);
                        assert_eq!(status, expected, "{context}");
                        if fits {
                            assert!(data == model[start..start + length], "{context}: other data");
                        }
                    }
                    2 | 3 => {
                        let data = pattern(step, length);
                        let cut = random.below(length + 1);
                        let pushed = [&header(VIRTIO_BLK_T_OUT, sector)[..], &data[..cut], &data[cut..]];
                        assert_eq!(ask(&mut driver, &pushed, &[1]).0, expected, "{context}");
                        if fits {
                            model[start..start + length].copy_from_slice(&data);
                        }
                    }
                    _ => {
                        let count = u32::try_from(sectors).unwrap();
                        let pushed = [&header(VIRTIO_BLK_T_WRITE_ZEROES, 0)[..], &range(sector, count, 1)];
                        assert_eq!(ask(&mut driver, &pushed, &[1]).0, expected, "{context}");
                        if fits {
                            model[start..start + length].fill(0);
                        }
                    }
                }
            }
            assert!(read(&mut driver, 0, model.len()).1 == model, "{engine:?} seed {seed}");
        }
    }
}

#[test]
fn another_disk_is_not_taken_for_the_saved_one() {
    let file = file(1 << 20);
    let mut driver = driver(&file, BlockEngine::Auto);
    let migrated = |driver: &mut Driver, bytes: u64, config: &BlockConfig| {
        let other = self::file(bytes);
        let moved = driver.migrate(create(&other, config).unwrap());
        moved.map_err(|error| error.to_string())
    };
    let renamed = BlockConfig {
        serial: "disk-8".to_owned(),
        ..config()
    };
    let error = migrated(&mut driver, 1 << 20, &renamed).unwrap_err();
    assert!(error.contains("another serial number"), "{error}");
    let error = migrated(&mut driver, 2 << 20, &config()).unwrap_err();
    assert!(error.contains("other properties"), "{error}");
    let read_only = BlockConfig {
        read_only: true,
        ..config()
    };
    let error = migrated(&mut driver, 1 << 20, &read_only).unwrap_err();
    assert!(error.contains("it was saved with other"), "{error}");
    migrated(&mut driver, 1 << 20, &config()).unwrap();
}

#[test]
fn the_state_is_what_the_golden_file_says() {
    let mut serial = [0; SERIAL_BYTES];
    serial[..6].copy_from_slice(b"disk-7");
    state::golden::check(env!("CARGO_MANIFEST_DIR"), &BlockState { serial });
}
