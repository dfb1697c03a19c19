//! Which CPUs are taken. Knows what the host has, changes nothing.

use std::cmp::Reverse;

use base::CpuSet;

use super::Error;

/// What there is to choose from.
#[derive(Debug, Default)]
pub(super) struct Host {
    pub(super) online: CpuSet,
    /// By sandboxes.
    pub(super) owned: CpuSet,
    /// Kept free of everything already.
    pub(super) pool: CpuSet,
    /// Those that Linux leaves without a tick.
    pub(super) tickless: CpuSet,
    /// NUMA nodes.
    pub(super) nodes: Vec<(u32, CpuSet)>,
}

/// So many CPUs, of one NUMA node where one has them: such that are isolated first, then such without a tick, then those with the
/// highest numbers. The host's first stays its own.
pub(super) fn choose(host: &Host, but: &CpuSet, count: usize) -> Result<CpuSet, Error> {
    let first = host.online.first().into_iter().collect();
    let spare = host.online.minus(&host.owned).minus(but).minus(&first);
    if spare.len() < count {
        return Err(Error::Spare {
            wanted: count,
            spare: spare.len(),
        });
    }
    let best = |cpus: CpuSet| -> Vec<u32> {
        let mut cpus: Vec<u32> = cpus.iter().collect();
        cpus.sort_by_key(|cpu| Reverse((host.pool.contains(*cpu), host.tickless.contains(*cpu), *cpu)));
        cpus.truncate(count);
        cpus
    };
    let value = |cpus: &Vec<u32>| {
        let among = |set: &CpuSet| cpus.iter().filter(|cpu| set.contains(**cpu)).count();
        (among(&host.pool), among(&host.tickless), cpus.first().copied())
    };
    let nodes = host.nodes.iter().map(|(_, cpus)| best(cpus.and(&spare)));
    let whole = nodes.filter(|cpus| cpus.len() == count).max_by_key(value);
    Ok(whole.unwrap_or_else(|| best(spare)).into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    fn host(online: &str) -> Host {
        Host {
            online: set(online),
            ..Host::default()
        }
    }

    fn chosen(host: &Host, count: usize) -> String {
        choose(host, &CpuSet::default(), count).unwrap().to_string()
    }

    #[test]
    fn the_highest_are_taken_and_the_first_is_kept() {
        assert_eq!(chosen(&host("0-3"), 2), "2-3");
        assert_eq!(chosen(&host("1,3"), 1), "3");
        let error = choose(&host("0-3"), &CpuSet::default(), 4).unwrap_err();
        assert!(matches!(error, Error::Spare { wanted: 4, spare: 3 }), "{error}");
        assert_eq!(choose(&host("0-3"), &set("3"), 2).unwrap(), set("1-2"));
    }

    #[test]
    fn what_others_own_is_not_taken() {
        let host = Host {
            owned: set("2-3"),
            ..host("0-3")
        };
        assert_eq!(chosen(&host, 1), "1");
        assert!(choose(&host, &CpuSet::default(), 2).is_err());
    }

    #[test]
    fn isolated_and_tickless_ones_come_first() {
        let host = Host {
            pool: set("1"),
            tickless: set("2"),
            ..host("0-7")
        };
        assert_eq!(chosen(&host, 1), "1");
        assert_eq!(chosen(&host, 2), "1-2");
        assert_eq!(chosen(&host, 3), "1-2,7");
    }

    #[test]
    fn they_are_of_one_node_where_one_has_enough() {
        let mut host = Host {
            nodes: vec![(0, set("0-3")), (1, set("4-7"))],
            owned: set("6-7"),
            ..host("0-7")
        };
        assert_eq!(chosen(&host, 2), "4-5");
        assert_eq!(chosen(&host, 3), "1-3");
        assert_eq!(chosen(&host, 5), "1-5");
        host.pool = set("2-3");
        assert_eq!(chosen(&host, 2), "2-3");
    }
}
