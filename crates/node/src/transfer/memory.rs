//! Whether the memory files beside a state are those that it names. Of the state, which is its VMM's to understand in its jail, this
//! looks at the frame, its sums, and one list's length. Knows no page.

use std::fs;

use node_api::portable::Kind;
use serde::Deserialize;
use serde::de::IgnoredAny;
use state::Container;

use super::names_in;
use crate::Error;
use crate::saved::memory_files;
use crate::saved::snapshots::Place;

/// The section that says how memory files are known, and its kind (`snapshot::memory_files`; docs/vmm.md has the layout).
const SECTION: &str = "memory";
const KIND: &str = "memory-file";

/// What is needed of it.
#[derive(Deserialize)]
struct Files {
    files: Vec<IgnoredAny>,
}

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

/// How many memory files a state names.
fn named(state: &[u8]) -> Result<usize, String> {
    let saved = Container::parse(state).and_then(|mut container| container.take_saved(SECTION));
    let saved = saved.map_err(|error| error.to_string())?;
    match (saved.kind.as_str(), saved.version) {
        // It has no list.
        (KIND, 1) => Ok(1),
        (KIND, 2) => serde_json::from_slice::<Files>(&saved.payload)
            .map(|memory| memory.files.len())
            .map_err(|error| error.to_string()),
        (kind, version) => Err(format!(
            "its memory is described as {}, version {version}",
            kind.escape_debug()
        )),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use state::{Fingerprint, Saved};

    use super::*;

    const GOLDEN: [&[u8]; 2] = [
        include_bytes!("../../../snapshot/golden/memory-file-v1.json"),
        include_bytes!("../../../snapshot/golden/memory-file-v2.json"),
    ];

    fn state(kind: &str, version: u32, payload: &[u8]) -> Vec<u8> {
        let mut container = Container::new(Fingerprint::default());
        let saved = Saved {
            kind: kind.to_owned(),
            version,
            payload: payload.to_vec(),
        };
        container.put_saved(SECTION, saved).unwrap();
        container.to_bytes().unwrap()
    }

    /// A state that names so many memory files, and nothing else.
    pub(in crate::transfer) fn naming(files: usize) -> Vec<u8> {
        let payload = serde_json::json!({ "files": vec![serde_json::json!({}); files] });
        state(KIND, 2, payload.to_string().as_bytes())
    }

    #[test]
    fn a_state_says_how_many_files_its_memory_has() {
        assert_eq!(named(&state(KIND, 1, GOLDEN[0])), Ok(1));
        assert_eq!(named(&state(KIND, 2, GOLDEN[1])), Ok(2));
        assert_eq!(named(&naming(5)), Ok(5));
        let damaged: [(Vec<u8>, &str); 5] = [
            (b"x".to_vec(), "is no snapshot"),
            (naming(1)[..40].to_vec(), ""),
            (state(KIND, 3, GOLDEN[1]), "memory-file, version 3"),
            (state("disk\\", 2, GOLDEN[1]), "version 2"),
            (state(KIND, 2, b"[]"), "expected"),
        ];
        for (bytes, says) in damaged {
            let told = named(&bytes).unwrap_err();
            assert!(told.contains(says), "{says}: {told}");
        }
    }
}
