//! How long a guest of a large host waits for memory that a device reaches: a model of the constants that were measured, laid beside the
//! published figures. Measures nothing.
//!
//! A host's memory is zeroed by threads, each at its own rate and all of them at no more than the memory takes; one thread behind them pins
//! it and maps it for the IOMMU, chunk after chunk. So all of it takes as long as the slower of both, and the first or last chunk by the other.

use std::fmt::Write;

/// In GB.
const CHUNK: f64 = 0.134;

/// What mapping takes of zeroing, pinning and mapping in turn, as the lab has it: 88 of 612 ms/GB (docs/devices.md).
const MAPPING_SHARE: f64 = 88.0 / 612.0;

/// Published of the system that this follows: 350 GB are there after more than 120 s, by one thread, as its figures are without it.
const PUBLISHED_GB: f64 = 350.0;
const PUBLISHED_SECONDS: f64 = 120.0;

/// What it says that it comes to, with 8 GB mapped before the guest starts.
const PUBLISHED_ASYNC_SECONDS: f64 = 20.0;

/// A host.
#[derive(Clone, Copy, Debug)]
struct Host {
    /// Seconds in which one thread zeroes a GB.
    zero: f64,
    /// Seconds in which a GB that is there is pinned and mapped.
    map: f64,
    /// GB/s that all threads together can write.
    bandwidth: f64,
}

impl Host {
    /// One for which the published figure is true; what its memory takes is an assumption.
    fn published() -> Self {
        let both = PUBLISHED_SECONDS / PUBLISHED_GB;
        Self {
            zero: both * (1.0 - MAPPING_SHARE),
            map: both * MAPPING_SHARE,
            bandwidth: 40.0,
        }
    }

    /// Seconds until so many GB are zeroed and mapped by one thread, one after the other.
    fn in_turn(self, gb: f64) -> f64 {
        gb * (self.zero + self.map)
    }

    /// Seconds until so many GB are zeroed by threads and mapped by another one behind them.
    fn behind(self, gb: f64, threads: u32) -> f64 {
        let zero = (self.zero / f64::from(threads)).max(1.0 / self.bandwidth);
        let chunk = CHUNK.min(gb);
        gb * zero.max(self.map) + chunk * zero.min(self.map)
    }

    /// Seconds until so many GB that were zeroed before are mapped.
    fn zeroed(self, gb: f64) -> f64 {
        gb * self.map
    }
}

/// The table.
pub(crate) fn table() -> String {
    let host = Host::published();
    let mut text = format!(
        "| seconds, modelled | 350 GB | 2000 GB |\n|---|---|---|\n| published: all memory mapped before the start | > {PUBLISHED_SECONDS:.0} | |\n| published: asynchronous, 8 GB before the start | < {PUBLISHED_ASYNC_SECONDS:.0} | |\n"
    );
    let mut row = |what: &str, seconds: &dyn Fn(f64) -> f64| {
        let (small, large) = (seconds(PUBLISHED_GB), seconds(2000.0));
        // Writing to a string does not fail.
        writeln!(text, "| {what} | {small:.1} | {large:.1} |").unwrap_or_default();
    };
    row("in turn, one thread", &|gb| host.in_turn(gb));
    row("`eager`: 4 threads and one behind them", &|gb| host.behind(gb, 4));
    row("`async`: until the device is there, boot memory 1 GiB", &|_| {
        host.behind(1.07, 4)
    });
    row("`async`: until the device is there, boot memory 8 GiB", &|_| {
        host.behind(8.6, 4)
    });
    row("`async`: until all memory is there, 4 threads", &|gb| {
        host.behind(gb, 4)
    });
    row("the same with 8 threads", &|gb| host.behind(gb, 8));
    row("all memory, had it been zeroed before", &|gb| host.zeroed(gb));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_figure_comes_out_where_it_went_in() {
        let host = Host::published();
        assert!((host.in_turn(PUBLISHED_GB) - PUBLISHED_SECONDS).abs() < 1e-9);
        assert!(host.zeroed(PUBLISHED_GB) < PUBLISHED_ASYNC_SECONDS);
    }

    #[test]
    fn neither_mapping_nor_memory_is_outrun() {
        let host = Host::published();
        for (gb, threads) in [(1.0, 1), (350.0, 4), (2000.0, 64)] {
            let seconds = host.behind(gb, threads);
            assert!(seconds >= host.zeroed(gb) && seconds >= gb / host.bandwidth);
            assert!(seconds <= host.in_turn(gb) + 1e-9);
        }
        assert!(host.behind(350.0, 4) < host.behind(350.0, 2));
        assert!(table().lines().count() == 11);
    }
}
