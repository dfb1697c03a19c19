//! Rate limits of a disk, by the wall clock: each test is wrong only if time runs too fast.

use std::time::{Duration, Instant};

use vmm_api::devices::BlockRate;

use super::*;

/// A started disk with limits.
fn limited(engine: BlockEngine, limits: BlockLimits) -> Driver {
    let config = BlockConfig {
        engine,
        limits,
        ..config()
    };
    let mut driver = Driver::new(create(&file(1 << 20), &config).unwrap()).with_queue_size(256);
    driver.start();
    driver
}

/// Requests whose answers come in any order, and are good.
fn are_answered(driver: &mut Driver, mut pushed: Vec<Pushed>) {
    while !pushed.is_empty() {
        let used = driver.wait_used(0).expect("an answer");
        let which = pushed.iter().position(|pushed| pushed.head == used.head).unwrap();
        let status = *pushed.swap_remove(which).writable.last().unwrap();
        assert_eq!(driver.bytes(status), [OK]);
    }
}

/// So slow that what waits for it waits for longer than any test does.
const SLOWEST: BlockRate = BlockRate {
    operations_per_second: None,
    bytes_per_second: Some(1),
};

/// Limits of writes alone.
fn writes_at(write: BlockRate) -> BlockLimits {
    BlockLimits {
        read: BlockRate::default(),
        write,
    }
}

fn operations(rate: u64) -> BlockRate {
    BlockRate {
        operations_per_second: Some(rate),
        bytes_per_second: None,
    }
}

#[test]
fn a_rate_of_one_direction_holds_and_leaves_the_other_alone() {
    for engine in ENGINES {
        let reads_at = |read| BlockLimits {
            read,
            write: BlockRate::default(),
        };
        // At the reads' rate the second write would wait for 512 seconds, which is longer than the driver does.
        let mut driver = limited(engine, reads_at(SLOWEST));
        for _ in 0..100 {
            assert_eq!(write(&mut driver, 0, &pattern(1, 512)), OK);
        }
        let mut driver = limited(engine, reads_at(operations(10)));
        let begun = Instant::now();
        let pushed: Vec<Pushed> = (0..10)
            .map(|_| driver.push(0, &[&header(VIRTIO_BLK_T_IN, 0)], &[512, 1]))
            .collect();
        driver.kick(0);
        are_answered(&mut driver, pushed);
        let reads = begun.elapsed();
        // A tenth of a second's worth passes at once, and one more: 8 have to wait.
        assert!(reads >= Duration::from_millis(8 * 1000 / 10), "10 reads in {reads:?}");
    }
}

#[test]
fn a_rate_of_bytes_counts_data() {
    for engine in ENGINES {
        let rate = BlockRate {
            bytes_per_second: Some(1 << 20),
            operations_per_second: None,
        };
        let mut driver = limited(engine, writes_at(rate));
        let begun = Instant::now();
        for _ in 0..8 {
            assert_eq!(write(&mut driver, 0, &pattern(1, 64 << 10)), OK);
        }
        let took = begun.elapsed();
        // 512 KiB, of which 102 KiB are the burst and the last 64 KiB a debt.
        assert!(took >= Duration::from_millis(320), "half a MiB in {took:?}");
    }
}

#[test]
fn a_reset_gives_up_what_waits() {
    for engine in ENGINES {
        let mut driver = limited(engine, writes_at(SLOWEST));
        for round in 0..3_u64 {
            let pushed: Vec<Pushed> = (0..20)
                .map(|number| {
                    let sector = header(VIRTIO_BLK_T_OUT, 20 * round + number);
                    driver.push(0, &[&sector, &pattern(2, 512)], &[1])
                })
                .collect();
            driver.kick(0);
            if round == 0 {
                assert_eq!(answer(&mut driver, 0, &pushed[0]).0, OK);
            }
            // At its rate each of the rest would wait for 512 seconds; a device that did would keep its VM from pausing.
            let begun = Instant::now();
            driver.reset();
            assert!(begun.elapsed() < Duration::from_secs(400), "{:?}", begun.elapsed());
            driver.start();
        }
        // Nor is it done: a guest would have as much as it likes.
        for sector in 0..60 {
            let expected = if sector == 0 { pattern(2, 512) } else { vec![0; 512] };
            assert_eq!(read(&mut driver, sector, 512), (OK, expected), "sector {sector}");
        }
    }
}

#[test]
fn a_pause_does_what_waits() {
    for engine in ENGINES {
        let mut driver = limited(engine, writes_at(SLOWEST));
        let mut pushed: Vec<Pushed> = (0..20)
            .map(|_| driver.push(0, &[&header(VIRTIO_BLK_T_OUT, 0), &pattern(2, 512)], &[1]))
            .collect();
        driver.kick(0);
        // One passes at once. The others may not all have been taken by then: those wait from later on, and for a later pause.
        assert_eq!(answer(&mut driver, 0, &pushed.remove(0)).0, OK);
        let end = Instant::now() + Duration::from_secs(60);
        while !pushed.is_empty() {
            assert!(Instant::now() < end, "{} wait still", pushed.len());
            driver.device().pause();
            driver.device().resume().unwrap();
            std::thread::sleep(Duration::from_millis(1));
            while let Some(used) = driver.poll_used(0) {
                let which = pushed.iter().position(|pushed| pushed.head == used.head).unwrap();
                let status = *pushed.swap_remove(which).writable.last().unwrap();
                assert_eq!(driver.bytes(status), [OK]);
            }
        }
    }
}

#[test]
fn a_rate_of_nothing_is_refused() {
    let limits = BlockLimits {
        read: operations(0),
        write: BlockRate::default(),
    };
    let config = BlockConfig { limits, ..config() };
    let Err(error) = create(&file(1 << 20), &config) else {
        panic!("it was made");
    };
    assert!(error.to_string().contains("read rate limit is 0"), "{error}");
}
