//! What a process holds in memory, by its `/proc/PID/smaps` (proc(5)). Does not know whose process it is.

use anyhow::{Context, Result, bail};

/// A VMM's memory beside its guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Own {
    /// Resident, without the guest's RAM.
    pub(crate) rss_kib: u64,
    /// The part of it that is backed by no file.
    pub(crate) anonymous_kib: u64,
    /// What the guest's RAM has resident.
    pub(crate) guest_rss_kib: u64,
}

#[derive(Default)]
struct Mapping {
    size: u64,
    rss: u64,
    anonymous: u64,
}

/// Adds up all mappings but the guest's RAM, which is the one of exactly `guest_kib`.
pub(crate) fn own(smaps: &str, guest_kib: u64) -> Result<Own> {
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (Some(key), value) = (words.next(), words.next()) else {
            continue;
        };
        let Some(key) = key.strip_suffix(':') else {
            // `7f0000000000-7f0000001000 rw-p ...` begins a mapping.
            mappings.push(Mapping::default());
            continue;
        };
        let field = mappings.last_mut().and_then(|mapping| match key {
            "Size" => Some(&mut mapping.size),
            "Rss" => Some(&mut mapping.rss),
            "Anonymous" => Some(&mut mapping.anonymous),
            _ => None,
        });
        if let Some(field) = field {
            let value = value.with_context(|| format!("`{line}` has no value"))?;
            *field = value.parse().with_context(|| format!("`{line}` is not understood"))?;
        }
    }
    let (guest, others): (Vec<_>, Vec<_>) = mappings.iter().partition(|mapping| mapping.size == guest_kib);
    let [guest] = guest.as_slice() else {
        bail!("{} mappings have {guest_kib} KiB, one is the guest's RAM", guest.len());
    };
    Ok(Own {
        rss_kib: others.iter().map(|mapping| mapping.rss).sum(),
        anonymous_kib: others.iter().map(|mapping| mapping.anonymous).sum(),
        guest_rss_kib: guest.rss,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
00400000-00500000 r-xp 00000000 fe:00 12 /opt/basalt/bin/basalt-vmm
Size:               1024 kB
Rss:                 600 kB
Anonymous:             8 kB
VmFlags: rd ex mr mw me
7f0000000000-7f0008000000 rw-p 00000000 00:00 0
Size:             131072 kB
Rss:               40000 kB
Anonymous:         40000 kB
7f0010000000-7f0010010000 rw-p 00000000 00:00 0 [heap]
Size:                 64 kB
Rss:                  20 kB
Anonymous:            20 kB
";

    #[test]
    fn the_guests_ram_is_left_out() {
        let expected = Own {
            rss_kib: 620,
            anonymous_kib: 28,
            guest_rss_kib: 40_000,
        };
        assert_eq!(own(TEXT, 131_072).unwrap(), expected);
    }

    #[test]
    fn guessing_is_refused() {
        assert!(own(TEXT, 4096).is_err());
        let twice = format!("{TEXT}{TEXT}");
        assert!(own(&twice, 131_072).is_err());
        assert!(own(&TEXT.replace("600 kB", "much kB"), 131_072).is_err());
    }
}
