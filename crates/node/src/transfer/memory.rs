//! Whether the memory files beside a state are those that it names. Of the state, which is its VMM's to understand in its jail, this
//! looks at the frame, its sums, and one list's length. Knows no page.

use std::fs;

use super::names_in;
use crate::Error;
use crate::saved::memory_files;
use crate::saved::snapshots::Place;
use crate::saved::state_file::named;
use node_api::transfer::Kind;

/// Refuses files with a gap between their numbers, and more or fewer than the machine's state names: its first clone would.
pub(super) fn check(place: &Place, kind: Kind) -> Result<(), Error> {
    let bad = |why: String| Err(Error::NotToBeLoaded(kind, why));
    let there = names_in(place)?
        .iter()
        .filter(|name| name.starts_with("memory"))
        .count();
    let in_a_row = memory_files::paths(place.directory()).len();
    if there != in_a_row {
        return bad(format!(
            "of its {there} memory files one is missing after the first {in_a_row}"
        ));
    }
    let path = place.state();
    // Its size has been looked at.
    let bytes = fs::read(&path).map_err(Error::file("read", &path))?;
    match named(&bytes) {
        Ok(named) if named == there => Ok(()),
        Ok(named) => bad(format!(
            "of memory files its state names {named}, and {there} have come"
        )),
        Err(why) => bad(format!("its state cannot be used: {why}")),
    }
}
