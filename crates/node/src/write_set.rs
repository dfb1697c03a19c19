//! The write set of a snapshot or a template: pages that a clone has written by the time it is one of its own. All clones write
//! nearly the same ones, so a VMM is told to copy them before its guest runs, which costs less than copying each when the guest
//! writes to it. It is a help and no more: whoever finds none, or a wrong one, clones as well.

use std::io::{self, ErrorKind};
use std::{fs, process};

use observe::span::span;
use vmm_api::{MAX_WRITE_SET, PageRuns, VmmClient};

use crate::snapshots::Place;
use crate::vm::Vm;

/// What a VMM is to copy; nothing where nobody knows.
pub(crate) fn read(place: &Place) -> PageRuns {
    let path = place.write_set();
    let read = || -> io::Result<PageRuns> { Ok(serde_json::from_slice(&fs::read(&path)?)?) };
    read().unwrap_or_else(|error| {
        if error.kind() != ErrorKind::NotFound {
            log::warn!("{} is of no use: {error}", path.display());
        }
        PageRuns::new()
    })
}

/// Keeps what the first clone has written until now.
pub(crate) fn keep_first(place: &Place, vm: &Vm) {
    let path = place.write_set();
    if path.exists() {
        return;
    }
    let _span = span("write set kept");
    let keep = || -> Result<(), Box<dyn std::error::Error>> {
        let runs = vm.ask("it was asked what it has written", VmmClient::write_set)?;
        check(&runs)?;
        if runs.is_empty() {
            return Err("it cannot be told what it has written".into());
        }
        // Two first ones do not write to one file.
        let beside = path.with_extension(format!("{}-{:?}", process::id(), std::thread::current().id()));
        let written = serde_json::to_vec(&runs)
            .map_err(io::Error::from)
            .and_then(|text| fs::write(&beside, text))
            .and_then(|()| fs::rename(&beside, &path));
        if written.is_err() {
            // What there is of it takes room on a full disk.
            drop(fs::remove_file(&beside));
        }
        Ok(written?)
    };
    if let Err(error) = keep() {
        log::info!("clones copy their pages one by one: {error}");
    }
}

/// A guest may have taken its VMM over, and others must not pay for that.
fn check(runs: &PageRuns) -> Result<(), String> {
    let pages = runs.iter().fold(0_u64, |all, (_, pages)| all.saturating_add(*pages));
    if pages > MAX_WRITE_SET {
        return Err(format!(
            "a write set of {pages} pages, where {MAX_WRITE_SET} are the most"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_that_is_missing_or_damaged_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path(), "a");
        fs::create_dir(place.directory()).unwrap();
        assert_eq!(read(&place), []);
        fs::write(place.write_set(), "[[1,2],[7,1]]").unwrap();
        assert_eq!(read(&place), [(1, 2), (7, 1)]);
        for damaged in ["", "[[1,2],", "[[1]]", "{}"] {
            fs::write(place.write_set(), damaged).unwrap();
            assert_eq!(read(&place), [], "{damaged}");
        }
    }

    #[test]
    fn no_vmm_makes_others_copy_all_of_their_memory() {
        assert_eq!(check(&vec![(0, MAX_WRITE_SET - 1), (1 << 40, 1)]), Ok(()));
        check(&vec![(0, MAX_WRITE_SET), (1 << 40, 1)]).unwrap_err();
        check(&vec![(0, u64::MAX), (0, u64::MAX)]).unwrap_err();
    }
}
