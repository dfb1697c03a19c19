//! How many files this process may have open at once. Knows nothing of what they are.

use std::fs;
use std::io;

use rustix::process::{Resource, getrlimit, setrlimit};

/// What the kernel allows where it says nothing else (`fs.nr_open`).
const KERNELS: u64 = 1 << 20;

/// Raises the soft limit to the hard one; how many there can be from then on. The soft one is commonly 1024 for the sake of programs that
/// use select(2). Programs that this one starts inherit it.
///
/// # Errors
/// Those of setrlimit(2).
pub fn raise() -> io::Result<u64> {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        limit.current = limit.maximum;
        setrlimit(Resource::Nofile, limit)?;
    }
    Ok(self::limit())
}

/// How many there can be.
pub fn limit() -> u64 {
    getrlimit(Resource::Nofile).current.unwrap_or(KERNELS)
}

/// How many there are.
///
/// # Errors
/// /proc is not mounted, or there is no descriptor left to look at it.
pub fn count() -> io::Result<usize> {
    // One of them is the directory itself.
    Ok(fs::read_dir("/proc/self/fd")?.count().saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one() {
        let before = getrlimit(Resource::Nofile);
        let hard = before.maximum.unwrap_or(KERNELS);
        assert_eq!(raise().unwrap(), hard);
        assert_eq!((limit(), getrlimit(Resource::Nofile).maximum), (hard, before.maximum));
        // Once more is nothing new.
        assert_eq!(raise().unwrap(), hard);
    }

    #[test]
    fn what_is_open_is_counted() {
        // Other tests of this process open and close theirs: a lot of them is seen all the same.
        let before = count().unwrap();
        let many: Vec<_> = (0..200).map(|_| fs::File::open("/proc/self/fd").unwrap()).collect();
        assert!(count().unwrap() >= before + many.len() - 100);
    }
}
