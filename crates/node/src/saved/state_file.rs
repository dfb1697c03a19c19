//! What a daemon reads of a machine's state, which is its VMM's to understand, in its jail: the frame, its sums, and how many memory files
//! it names. Knows no page.

use serde::Deserialize;
use serde::de::IgnoredAny;
use state::Container;

/// The section that says how memory files are known, and its kind (`snapshot::memory_files`; docs/vmm.md has the layout).
const SECTION: &str = "memory";
const KIND: &str = "memory-file";

/// What is needed of it.
#[derive(Deserialize)]
struct Files {
    files: Vec<IgnoredAny>,
}

/// How many memory files a state names.
pub(crate) fn named(state: &[u8]) -> Result<usize, String> {
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
    pub(crate) fn naming(files: usize) -> Vec<u8> {
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
