//! Many pieces of memory in few requests: neighbours are mapped together. Knows no guest.

use std::num::NonZeroU64;

use crate::{AddressSpace, Mapped, Piece, UnmapError, VfioError};

/// How much one request maps at most, if nothing else is wanted. What is mapped together is unmapped together, so that this is also the
/// unit in which memory can be given back; with 65 535 mappings, which a container takes, it reaches for 8 TiB.
pub const CHUNK: NonZeroU64 = NonZeroU64::new(128 << 20).unwrap();

/// Joins pieces that are neighbours both for functions and in this process, and cuts the runs at multiples of `granularity` of the
/// addresses that functions use. Ascending.
pub fn runs(pieces: impl IntoIterator<Item = Piece>, granularity: NonZeroU64) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = pieces.into_iter().filter(|piece| piece.length > 0).collect();
    pieces.sort_unstable();
    let mut joined: Vec<Piece> = Vec::new();
    for piece in pieces {
        match joined.last_mut() {
            Some(last) if follows(last, &piece) => last.length += piece.length,
            _ => joined.push(piece),
        }
    }
    joined.into_iter().flat_map(|run| cut(run, granularity)).collect()
}

fn follows(last: &Piece, piece: &Piece) -> bool {
    last.iova.checked_add(last.length) == Some(piece.iova)
        && last.address.checked_add(last.length) == Some(piece.address)
}

fn cut(run: Piece, granularity: NonZeroU64) -> impl Iterator<Item = Piece> {
    let mut rest = run;
    std::iter::from_fn(move || {
        let most = granularity.get() - rest.iova % granularity;
        let first = Piece {
            length: rest.length.min(most),
            ..rest
        };
        // Of a run that wraps around the first piece is refused by whoever maps it.
        rest = Piece {
            iova: rest.iova.wrapping_add(first.length),
            address: rest.address.wrapping_add(first.length),
            length: rest.length - first.length,
        };
        (first.length > 0).then_some(first)
    })
}

/// Why not all pieces could be mapped.
#[derive(Debug, thiserror::Error)]
#[error("{source}")]
pub struct MapAllError {
    /// Why.
    pub source: VfioError,
    /// What is mapped all the same, as it could not be unmapped again: nothing, unless the kernel is at fault.
    pub left: Vec<UnmapError>,
}

impl From<VfioError> for MapAllError {
    fn from(source: VfioError) -> Self {
        Self {
            source,
            left: Vec::new(),
        }
    }
}

/// Maps all pieces in runs of at most `granularity`, or none.
///
/// # Errors
/// As [`AddressSpace::map`], and if the space takes fewer mappings. What had been mapped is unmapped again; the error has what could not be.
///
/// # Safety
/// As [`AddressSpace::map`], for each piece, and for what an error says to be mapped still.
pub unsafe fn map_all(
    space: &dyn AddressSpace,
    pieces: impl IntoIterator<Item = Piece>,
    granularity: NonZeroU64,
) -> Result<Vec<Mapped>, MapAllError> {
    // SAFETY: what is asked is the same.
    unsafe { map_runs(space, &runs(pieces, granularity), |_| Ok(())) }
}

/// Maps all of these runs, or none; before each one `before` is told which it is, by its place among them.
///
/// # Errors
/// As [`map_all`], and those of `before`.
///
/// # Safety
/// As [`map_all`].
pub unsafe fn map_runs(
    space: &dyn AddressSpace,
    runs: &[Piece],
    mut before: impl FnMut(usize) -> Result<(), VfioError>,
) -> Result<Vec<Mapped>, MapAllError> {
    check_room(space, runs.len())?;
    let mut mapped = Vec::with_capacity(runs.len());
    for (index, run) in runs.iter().enumerate() {
        // SAFETY: 1 and 2 are the caller's, of the pieces that the run consists of.
        let next = before(index).and_then(|()| unsafe { space.map(*run) });
        match next {
            Ok(piece) => mapped.push(piece),
            Err(source) => {
                let left = unmap_all(space, mapped);
                return Err(MapAllError { source, left });
            }
        }
    }
    Ok(mapped)
}

fn check_room(space: &dyn AddressSpace, needed: usize) -> Result<(), VfioError> {
    match space.available()? {
        Some(available) if u32::try_from(needed).is_ok_and(|needed| needed > available) => {
            Err(VfioError::Mappings { needed, available })
        }
        _ => Ok(()),
    }
}

/// Unmaps all, the last first, whatever fails; what is left over is still mapped.
pub fn unmap_all(space: &dyn AddressSpace, mapped: Vec<Mapped>) -> Vec<UnmapError> {
    let results = mapped.into_iter().rev().map(|piece| space.unmap(piece));
    results.filter_map(Result::err).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::random::Random;
    use crate::fake::{FakeSpace, Op};

    const MIB: u64 = 1 << 20;

    fn piece(iova: u64, address: u64, length: u64) -> Piece {
        Piece { iova, address, length }
    }

    #[test]
    fn neighbours_are_joined_and_cut_at_multiples() {
        let pieces = [
            piece(300 * MIB, 0x7_0000_0000 + 300 * MIB, 2 * MIB),
            piece(0, 0x7_0000_0000, 200 * MIB),
            piece(200 * MIB, 0x7_0000_0000 + 200 * MIB, 100 * MIB),
            // A neighbour for functions alone.
            piece(302 * MIB, 0x9_0000_0000, MIB),
            piece(400 * MIB, 0, 0),
        ];
        let runs = runs(pieces, CHUNK);
        let found: Vec<_> = runs.iter().map(|run| (run.iova / MIB, run.length / MIB)).collect();
        assert_eq!(found, [(0, 128), (128, 128), (256, 46), (302, 1)]);
        assert_eq!(runs[2].address, 0x7_0000_0000 + 256 * MIB);
        assert_eq!(runs[3].address, 0x9_0000_0000);
    }

    #[test]
    fn a_guest_costs_as_many_calls_as_it_has_chunks() {
        let space = FakeSpace::new();
        let guest = [
            piece(0, 0x10_0000_0000, 3 << 30),
            piece(4 << 30, 0x20_0000_0000, 9 << 30),
        ];
        // SAFETY: nobody reaches it by the fake.
        let mapped = unsafe { map_all(&space, guest, CHUNK) }.unwrap();
        assert_eq!((mapped.len(), space.count(Op::Map)), (96, 96));
        assert_eq!(space.mapped_bytes(), 12 << 30);
        assert!(unmap_all(&space, mapped).is_empty());
        assert_eq!(space.mapped_bytes(), 0);
    }

    #[test]
    fn a_failure_in_the_middle_leaves_nothing_mapped() {
        let space = FakeSpace::new();
        space.fail(Op::Map, 3);
        // SAFETY: as above.
        let error = unsafe { map_all(&space, [piece(0, 0x10_0000_0000, 1 << 30)], CHUNK) }.unwrap_err();
        assert!(error.left.is_empty());
        let error = error.source;
        assert!(matches!(error, VfioError::Map { iova: 0x1000_0000, .. }), "{error}");
        assert_eq!((space.mapped_bytes(), space.count(Op::Unmap)), (0, 2));
    }

    #[test]
    fn what_cannot_be_unmapped_after_a_failure_is_told() {
        let space = FakeSpace::new();
        space.fail(Op::Map, 3);
        space.fail(Op::Unmap, 2);
        // SAFETY: as above.
        let error = unsafe { map_all(&space, [piece(0, 0x10_0000_0000, 1 << 30)], CHUNK) }.unwrap_err();
        let left: Vec<u64> = error.left.iter().map(|left| left.mapped.iova()).collect();
        assert_eq!(left, [0]);
        assert_eq!(space.mapped_bytes(), CHUNK.get());
        error.left.into_iter().for_each(|left| left.mapped.abandon());
    }

    /// Pieces that do not overlap, of which some are neighbours, out of order.
    fn pieces(random: &mut Random) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let (mut iova, mut address) = (0, 0x10_0000_0000);
        for _ in 0..random.below(12) {
            iova += random.below(2) * random.below(300) * MIB;
            address += random.below(3) * MIB;
            let length = random.below(200) * MIB;
            pieces.push(piece(iova, address, length));
            (iova, address) = (iova + length, address + length);
        }
        for index in (1..pieces.len()).rev() {
            pieces.swap(index, usize::try_from(random.below(index as u64 + 1)).unwrap());
        }
        pieces
    }

    #[test]
    fn all_of_any_pieces_are_mapped_or_nothing() {
        for seed in 0..500 {
            let mut random = Random(seed);
            let pieces = pieces(&mut random);
            // Below 0xfee00000, at which it would end.
            let fits = pieces.iter().all(|piece| piece.iova + piece.length <= 0xfee0_0000);
            let space = FakeSpace::new();
            let failing = random.below(4);
            if failing > 0 {
                space.fail(Op::Map, failing);
            }
            // SAFETY: as above.
            match unsafe { map_all(&space, pieces.iter().copied(), CHUNK) } {
                Ok(mapped) => {
                    for piece in pieces.iter().filter(|piece| piece.length > 0) {
                        let found = space.translate(piece.iova, piece.length);
                        assert_eq!(found, Ok(piece.address), "seed {seed}");
                    }
                    let sum: u64 = pieces.iter().map(|piece| piece.length).sum();
                    assert_eq!(space.mapped_bytes(), sum, "seed {seed}");
                    let is_cut =
                        |piece: &Piece| piece.length <= CHUNK.get() && piece.iova % CHUNK + piece.length <= CHUNK.get();
                    assert!(space.mapped().iter().all(is_cut), "seed {seed}");
                    assert!(failing == 0 || failing > space.count(Op::Map), "seed {seed}");
                    assert!(unmap_all(&space, mapped).is_empty());
                }
                Err(error) => assert!(failing > 0 || !fits, "seed {seed}: {error}"),
            }
            assert_eq!(space.mapped(), [], "seed {seed}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_before_anything_is_mapped() {
        let space = FakeSpace::new().with_limit(7);
        // SAFETY: as above.
        let error = unsafe { map_all(&space, [piece(0, 0x10_0000_0000, 1 << 30)], CHUNK) }.unwrap_err();
        assert!(matches!(
            error.source,
            VfioError::Mappings {
                needed: 8,
                available: 7
            }
        ));
        assert_eq!(space.count(Op::Map), 0);
    }
}
