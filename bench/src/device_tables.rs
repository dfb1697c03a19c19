//! What is made of the times of starts with a function of the host's: tables by way and size, slopes, and what they are held against.
//! Starts nothing.

use std::collections::BTreeMap;

use base::ByteSize;

use crate::device_progress::Start;
use crate::device_start::Way;
use crate::report::{Figure, cell};
use crate::stats::{Target, slope};

/// Every start by way and size in MiB, in the order of rounds.
pub(crate) type Starts = BTreeMap<(Way, u64), Vec<Start>>;

const INIT: &str = "A start with a function of the host's: VMM exec to the agent's first instruction";
const SLOPE: &str = "The same, for each GiB more";
const DEVICE: &str = "The same, to the function on the guest's bus";
const MEMORY: &str = "The same, to all of the guest's memory";
const ZEROING: &str = "Beside that: zeroing memory before a start, while nobody waits";
const CREATED: &str = "The same, to a VMM that is made: `create` is answered, QEMU's monitor answers";
const MAP_CALLS: &str = "Calls that map the guest's memory for the function";
const HITS: &str = "Plugs that found their memory mapped";

/// What starts are held against: 1 GiB, where it is measured, and what of them is to be how flat.
const ONE_GIB: u64 = 1024;
const SLOPE_OF_EAGER: f64 = 0.1;
const OF_ONE_GIB: f64 = 1.15;
const OF_PLAIN: f64 = 1.05;
const MEMORY_OF_EAGER: f64 = 1.1;
const CREATED_OF_SMALLEST: f64 = 1.1;
const HIT_SHARE: f64 = 99.0;

/// One call for so many MiB, and some besides.
const PIECE: u64 = 128;
const BESIDES: u64 = 8;

/// All tables, of these sizes in MiB, from the smallest up.
pub(crate) fn figures(starts: &Starts, sizes: &[u64]) -> Vec<Figure> {
    let (Some(&smallest), Some(&largest)) = (sizes.first(), sizes.last()) else {
        return Vec::new();
    };
    let of = |name: &str, unit: &str, value: &dyn Fn(&Start) -> Option<f64>| table(name, unit, (starts, sizes), value);
    let mut init = of(INIT, "ms", &|start| Some(start.init));
    let one_gib = if sizes.contains(&ONE_GIB) { ONE_GIB } else { smallest };
    let asynchronous = at(Way::Async, largest);
    if one_gib < largest {
        init.ratio(&asynchronous, &at(Way::Async, one_gib), Target::AtMost(OF_ONE_GIB));
    }
    init.ratio(&asynchronous, &at(Way::Plain, largest), Target::AtMost(OF_PLAIN));
    faster_than_peers(&mut init, sizes);
    let device = of(DEVICE, "ms", &|start| start.device);
    let mut memory = of(MEMORY, "ms", &|start| Some(start.memory));
    memory.ratio(&asynchronous, &at(Way::Eager, largest), Target::AtMost(MEMORY_OF_EAGER));
    memory.ratio(&at(Way::AsyncZeroed, largest), &asynchronous, Target::Under(1.0));
    faster_than_peers(&mut memory, sizes);
    let zeroing = of(ZEROING, "ms", &|start| start.zeroing);
    let mut created = of(CREATED, "ms", &|start| Some(start.created));
    if smallest < largest {
        let target = Target::AtMost(CREATED_OF_SMALLEST);
        created.ratio(&asynchronous, &at(Way::Async, smallest), target);
    }
    let mut calls = of(MAP_CALLS, "calls", &|start| {
        Some(float(start.counts?.map_calls)).filter(|calls| *calls > 0.0)
    });
    for &size in sizes {
        let most = float(size / PIECE + BESIDES);
        calls.absolute(&at(Way::Async, size), Target::AtMost(most));
    }
    let mut hits = of(HITS, "%", &hit_share);
    hits.absolute(&asynchronous, Target::AtLeast(HIT_SHARE));
    let slopes = slopes(starts, sizes);
    let all = [init, slopes, device, memory, zeroing, created, calls, hits];
    all.into_iter().filter(|figure| !figure.series.is_empty()).collect()
}

/// Whether eager starts take longer with more memory; otherwise nothing can be held against them.
pub(crate) fn eager_grows(figures: &[Figure]) -> bool {
    let slopes = figures.iter().rev().find(|figure| figure.name == SLOPE);
    let eager = slopes.and_then(|figure| figure.median(Way::Eager.name()));
    eager.is_some_and(|slope| slope > 0.0)
}

/// What a series is called.
fn at(way: Way, size: u64) -> String {
    cell(way.name(), &ByteSize::mib(size).to_string())
}

fn table(name: &str, unit: &str, (starts, sizes): (&Starts, &[u64]), value: &dyn Fn(&Start) -> Option<f64>) -> Figure {
    let columns: Vec<String> = sizes.iter().map(|&size| ByteSize::mib(size).to_string()).collect();
    let mut figure = Figure::beside(name, unit, columns.iter().map(String::as_str));
    for way in Way::ALL {
        for (size, column) in sizes.iter().zip(&columns) {
            for sample in starts.get(&(way, *size)).into_iter().flatten().filter_map(value) {
                figure.put(way.name(), column, sample);
            }
        }
    }
    figure
}

/// By each peer at the size where ours is least ahead.
fn faster_than_peers(figure: &mut Figure, sizes: &[u64]) {
    for peer in [Way::QemuEager, Way::QemuMem] {
        let ratio = |&size: &u64| Some(figure.median(&at(Way::Async, size))? / figure.median(&at(peer, size))?);
        let worst = sizes.iter().filter_map(ratio).reduce(f64::max);
        if let Some(worst) = worst {
            let what = format!("{} / {}, at the worst of all sizes", Way::Async.name(), peer.name());
            figure.judge(&what, worst, Target::Under(1.0));
        }
    }
}

/// Of the straight line through each round's starts of all sizes.
fn slopes(starts: &Starts, sizes: &[u64]) -> Figure {
    let mut figure = Figure::new(SLOPE, "ms");
    for way in Way::ALL {
        let rounds = sizes.iter().filter_map(|&size| starts.get(&(way, size))).map(Vec::len);
        let samples = (0..rounds.min().unwrap_or(0)).filter_map(|round| {
            let point = |&size: &u64| Some((gibi(size), starts.get(&(way, size))?.get(round)?.init));
            slope(&sizes.iter().filter_map(point).collect::<Vec<_>>())
        });
        figure.add(way.name(), samples.collect());
    }
    if figure.median(Way::Eager.name()).is_some_and(|slope| slope > 0.0) {
        let target = Target::AtMost(SLOPE_OF_EAGER);
        figure.ratio(Way::Async.name(), Way::Eager.name(), target);
        figure.ratio(Way::Balloon.name(), Way::Eager.name(), target);
    }
    figure
}

/// In hundredths; nothing of a guest that has plugged nothing.
fn hit_share(start: &Start) -> Option<f64> {
    let counts = start.counts?;
    let all = counts.hits + counts.misses;
    (all > 0).then(|| 100.0 * float(counts.hits) / float(all))
}

#[allow(clippy::cast_precision_loss, reason = "counts and sizes are far below 2^53")]
fn float(value: u64) -> f64 {
    value as f64
}

fn gibi(mebi: u64) -> f64 {
    float(mebi) / 1024.0
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::device_progress::Counts;

    const SIZES: [u64; 3] = [512, 1024, 4096];

    /// So many milliseconds at all, and for each GiB.
    fn start(way: Way, size: u64, round: u64) -> Start {
        let (flat, each) = match way {
            Way::Plain => (1000.0, 0.0),
            Way::Eager => (1100.0, 700.0),
            Way::Late => (1000.0, 10.0),
            Way::Async
            | Way::AsyncOnDemand
            | Way::AsyncZeroed
            | Way::Balloon
            | Way::BalloonByUnits
            | Way::BalloonOnDemand => (1010.0, 35.0),
            Way::QemuEager => (2000.0, 1200.0),
            Way::QemuMem => (2500.0, 100.0),
        };
        let init = flat + each * gibi(size) + float(round);
        let counts = Counts {
            map_calls: size / 128 + 2,
            hits: if size > 512 { 199 } else { 0 },
            misses: u64::from(size > 512),
        };
        let is_ours = !matches!(way, Way::Plain | Way::QemuEager | Way::QemuMem);
        Start {
            created: 100.0 + gibi(size),
            init,
            device: is_ours.then_some(init + 5.0),
            memory: match way {
                Way::Eager => init,
                Way::AsyncZeroed => init + 200.0 * gibi(size),
                _ => init + 800.0 * gibi(size),
            },
            zeroing: (way == Way::AsyncZeroed).then_some(500.0 * gibi(size)),
            counts: is_ours.then_some(counts),
        }
    }

    fn starts() -> Starts {
        let mut starts = Starts::new();
        for way in Way::ALL {
            for size in SIZES.into_iter().filter(|size| way.has(*size)) {
                let rounds = (0..3).map(|round| start(way, size, round));
                starts.insert((way, size), rounds.collect());
            }
        }
        starts
    }

    fn verdict(figures: &[Figure], name: &str, what: &str) -> (f64, bool) {
        let figure = figures.iter().find(|figure| figure.name == name).unwrap();
        let verdict = figure.verdicts.iter().find(|verdict| verdict.what == what);
        let verdict = verdict.unwrap_or_else(|| panic!("{name} has no {what}"));
        (verdict.value, verdict.reached)
    }

    fn near((value, reached): (f64, bool), expected: (f64, bool)) {
        assert!((value - expected.0).abs() < 1e-9, "{value} is not {}", expected.0);
        assert_eq!(reached, expected.1);
    }

    #[test]
    fn slopes_are_of_each_round_and_held_against_eager_ones() {
        let figures = figures(&starts(), &SIZES);
        let slopes = figures.iter().find(|figure| figure.name == SLOPE).unwrap();
        let eager = slopes
            .series
            .iter()
            .find(|series| series.who == "Basalt, eager")
            .unwrap();
        assert_eq!(eager.samples.len(), 3);
        assert!((eager.median - 700.0).abs() < 1e-9);
        near(verdict(&figures, SLOPE, "Basalt, async / Basalt, eager"), (0.05, true));
        assert!(eager_grows(&figures));
    }

    #[test]
    fn nothing_is_held_against_eager_starts_that_do_not_grow() {
        let mut flat = starts();
        flat.iter_mut()
            .filter(|((way, _), _)| *way == Way::Eager)
            .for_each(|(_, starts)| starts.iter_mut().for_each(|start| start.init = 1000.0));
        let figures = figures(&flat, &SIZES);
        assert!(!eager_grows(&figures));
        let slopes = figures.iter().find(|figure| figure.name == SLOPE).unwrap();
        assert!(slopes.verdicts.is_empty());
    }

    #[test]
    fn the_largest_is_held_against_one_gibibyte_and_no_device() {
        let figures = figures(&starts(), &SIZES);
        let (large, small) = (1010.0 + 4.0 * 35.0 + 1.0, 1010.0 + 35.0 + 1.0);
        let of = |what: &str| verdict(&figures, INIT, &format!("Basalt, async, 4 GiB / {what}"));
        near(of("Basalt, async, 1 GiB"), (large / small, true));
        near(of("Basalt, no device, 4 GiB"), (large / 1001.0, false));
    }

    #[test]
    fn peers_count_at_the_size_where_they_are_best() {
        let figures = figures(&starts(), &SIZES);
        let what = |peer: &str| format!("Basalt, async / {peer}, at the worst of all sizes");
        // What a peer has of the smallest size is held against ours of that; QEMU has no virtio-mem there.
        let eager = verdict(&figures, INIT, &what("QEMU, vfio-pci"));
        near(eager, ((1010.0 + 17.5 + 1.0) / (2000.0 + 600.0 + 1.0), true));
        let mem = verdict(&figures, INIT, &what("QEMU, vfio-pci and virtio-mem"));
        near(mem, ((1010.0 + 35.0 + 1.0) / (2500.0 + 100.0 + 1.0), true));
        let mut slow = starts();
        let large = slow.get_mut(&(Way::Async, 4096)).unwrap();
        large.iter_mut().for_each(|start| start.memory = 20_000.0);
        let figures = super::figures(&slow, &SIZES);
        assert!(!verdict(&figures, MEMORY, &what("QEMU, vfio-pci")).1);
    }

    #[test]
    fn memory_is_held_against_all_of_an_eager_start_and_making_a_vmm_against_the_smallest() {
        let figures = figures(&starts(), &SIZES);
        let eager = 1100.0 + 4.0 * 700.0 + 1.0;
        let memory = verdict(&figures, MEMORY, "Basalt, async, 4 GiB / Basalt, eager, 4 GiB");
        near(memory, ((1151.0 + 3200.0) / eager, false));
        let zeroed = verdict(
            &figures,
            MEMORY,
            "Basalt, async, zeroed ahead, 4 GiB / Basalt, async, 4 GiB",
        );
        near(zeroed, ((1151.0 + 800.0) / (1151.0 + 3200.0), true));
        let zeroing = figures.iter().find(|figure| figure.name == ZEROING).unwrap();
        assert_eq!(zeroing.median("Basalt, async, zeroed ahead, 4 GiB"), Some(2000.0));
        let created = verdict(&figures, CREATED, "Basalt, async, 4 GiB / Basalt, async, 512 MiB");
        near(created, (104.0 / 100.5, true));
    }

    #[test]
    fn calls_are_counted_by_size_and_hits_of_what_was_plugged() {
        let figures = figures(&starts(), &SIZES);
        near(verdict(&figures, MAP_CALLS, "Basalt, async, 512 MiB"), (6.0, true));
        near(verdict(&figures, MAP_CALLS, "Basalt, async, 4 GiB"), (34.0, true));
        near(verdict(&figures, HITS, "Basalt, async, 4 GiB"), (99.5, true));
        let mut more = starts();
        for start in more.get_mut(&(Way::Async, 4096)).unwrap() {
            start.counts = Some(Counts {
                map_calls: 4096 / 128 + 9,
                hits: 98,
                misses: 2,
            });
        }
        let figures = super::figures(&more, &SIZES);
        near(verdict(&figures, MAP_CALLS, "Basalt, async, 4 GiB"), (41.0, false));
        near(verdict(&figures, HITS, "Basalt, async, 4 GiB"), (98.0, false));
    }

    #[test]
    fn rows_are_ways_and_columns_sizes() {
        let report = crate::report::Report {
            figures: figures(&starts(), &SIZES),
            ..crate::report::Report::default()
        };
        let text = report.news(&mut crate::report::Printed::default()).unwrap();
        assert!(text.contains("| median, ms | 512 MiB | 1 GiB | 4 GiB |"), "{text}");
        assert!(text.contains("| QEMU, vfio-pci and virtio-mem |  | 2601"), "{text}");
        assert!(text.contains("| Basalt, no device | 1001 (1000-1002) |"), "{text}");
        // Of one size nothing can be told but what it took.
        let figures = super::figures(&starts(), &[4096]);
        assert!(figures.iter().all(|figure| figure.name != SLOPE));
        assert!(
            !figures[0]
                .verdicts
                .iter()
                .any(|verdict| verdict.what.contains("async, 4 GiB / Basalt, async"))
        );
    }
}
