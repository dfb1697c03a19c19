//! What a state says of its memory's files: how to know them, and which page lies in which. Opens none.

use std::fs::File;
use std::sync::Arc;

use base::ByteSize;
use memory::{Image, Layer, Layers, Segment, Witness};
use serde::{Deserialize, Serialize};
use state::{Schema, StateError};

use crate::SnapshotError;

/// All files of a memory, the lowest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MemoryFiles {
    bytes: u64,
    files: Vec<MemoryFile>,
    /// First page, number of pages and number of the file of those that do not lie in the lowest file.
    segments: Vec<(u64, u64, usize)>,
}

/// What is known of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct MemoryFile {
    /// Pages with content.
    pages: u64,
    /// Page numbers and CRC-32 of some of them.
    witnesses: Vec<(u64, u32)>,
}

/// The first version: one file.
#[derive(Deserialize)]
struct OneFile {
    bytes: u64,
    pages: u64,
    witnesses: Vec<(u64, u32)>,
}

impl Schema for MemoryFiles {
    const KIND: &'static str = "memory-file";
    const VERSION: u32 = 2;

    fn load(version: u32, payload: &[u8]) -> Result<Self, StateError> {
        let failed = |source| StateError::Payload {
            kind: Self::KIND,
            source,
        };
        match version {
            1 => {
                let OneFile {
                    bytes,
                    pages,
                    witnesses,
                } = serde_json::from_slice(payload).map_err(failed)?;
                Ok(Self {
                    bytes,
                    files: vec![MemoryFile { pages, witnesses }],
                    segments: Vec::new(),
                })
            }
            Self::VERSION => serde_json::from_slice(payload).map_err(failed),
            found => Err(StateError::Version {
                kind: Self::KIND.to_owned(),
                found,
                known: Self::VERSION,
            }),
        }
    }
}

impl MemoryFile {
    fn new(image: &Image) -> Self {
        let witnesses = image.witnesses.iter();
        Self {
            pages: image.pages,
            witnesses: witnesses.map(|witness| (witness.page, witness.checksum)).collect(),
        }
    }

    fn image(&self) -> Image {
        let witnesses = self.witnesses.iter();
        Image {
            pages: self.pages,
            witnesses: witnesses.map(|&(page, checksum)| Witness { page, checksum }).collect(),
        }
    }
}

impl MemoryFiles {
    pub(crate) fn new(size: ByteSize, layers: &Layers) -> Self {
        let segments = layers.segments().iter();
        Self {
            bytes: size.bytes(),
            files: layers
                .files()
                .iter()
                .map(|layer| MemoryFile::new(&layer.image))
                .collect(),
            segments: segments
                .map(|segment| (segment.first, segment.pages, segment.file))
                .collect(),
        }
    }

    /// Those of a machine with nothing in its memory.
    pub(crate) fn without_content(size: ByteSize) -> Self {
        Self {
            bytes: size.bytes(),
            files: vec![MemoryFile::default()],
            segments: Vec::new(),
        }
    }

    /// The size of the memory.
    pub(crate) fn size(&self) -> ByteSize {
        ByteSize(self.bytes)
    }

    /// With the files themselves; that they are the right ones is not checked here.
    pub(crate) fn layers(self, files: Vec<File>) -> Result<Layers, SnapshotError> {
        if files.len() != self.files.len() {
            return Err(SnapshotError::Files {
                saved: self.files.len(),
                here: files.len(),
            });
        }
        let layers = files.into_iter().zip(&self.files).map(|(file, known)| Layer {
            file: Arc::new(file),
            image: known.image(),
        });
        let segments = self.segments.iter();
        let segments = segments.map(|&(first, pages, file)| Segment { first, pages, file });
        Ok(Layers::new(layers.collect(), segments.collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = env!("CARGO_MANIFEST_DIR");

    fn file(pages: u64) -> MemoryFile {
        MemoryFile {
            pages,
            witnesses: vec![(7, 0xdead_beef)],
        }
    }

    #[test]
    fn the_memory_files_are_what_the_golden_file_says() {
        let files = MemoryFiles {
            bytes: 32 << 20,
            files: vec![file(3), file(2)],
            segments: vec![(7, 2, 1)],
        };
        state::golden::check(ROOT, &files);
    }

    #[test]
    fn the_first_version_is_one_file() {
        let read: MemoryFiles = state::golden::load(ROOT, 1);
        assert_eq!(
            (read.bytes, read.files, read.segments),
            (32 << 20, vec![file(3)], vec![])
        );
    }
}
