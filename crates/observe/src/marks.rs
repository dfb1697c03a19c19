//! Moments in the life of this process, each by the first time that it was reached. For what is asked once, such as
//! where a start's time went; what happens often is counted instead. Knows no component's moments.

use std::sync::{Mutex, PoisonError};

use crate::span::now_ns;

/// More than any program of ours has.
const MAX_MARKS: usize = 64;

/// A moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// What was reached.
    pub name: &'static str,
    /// CLOCK_MONOTONIC.
    pub at_ns: u64,
}

static MARKS: Mutex<Vec<Mark>> = Mutex::new(Vec::new());

/// Notes that `name` was reached, if it was not before.
pub fn mark(name: &'static str) {
    let at_ns = now_ns();
    let mut marks = MARKS.lock().unwrap_or_else(PoisonError::into_inner);
    if marks.len() < MAX_MARKS && marks.iter().all(|mark| mark.name != name) {
        marks.push(Mark { name, at_ns });
    }
}

/// All moments so far, in their order.
pub fn all() -> Vec<Mark> {
    let mut marks = MARKS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    marks.sort_by_key(|mark| mark.at_ns);
    marks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_time_counts() {
        let before = now_ns();
        mark("test: one");
        mark("test: two");
        let first = all();
        mark("test: one");
        let marks: Vec<_> = all().into_iter().filter(|mark| mark.name.starts_with("test")).collect();
        assert_eq!(
            marks.iter().map(|mark| mark.name).collect::<Vec<_>>(),
            ["test: one", "test: two"]
        );
        assert!(marks[0].at_ns >= before && first.contains(&marks[0]));
    }
}
