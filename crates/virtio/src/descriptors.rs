//! Walking a chain of split descriptors (2.7.5), once, into checked slices of guest memory.
//!
//! A table is looked up in guest memory as a whole and a buffer's region is remembered for the next buffer, because a
//! large request has hundreds of them. Knows neither rings nor what a chain means.

use memory::GuestRam;
use virtio_queue::desc::split::Descriptor;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, VolatileMemory, VolatileSlice};

use crate::buffers::ChainFault;

/// Bytes of one descriptor (2.7.5).
const DESCRIPTOR: usize = size_of::<Descriptor>();

/// Descriptors in guest memory.
#[derive(Clone, Copy, Debug)]
struct Table<'m>(VolatileSlice<'m>);

impl<'m> Table<'m> {
    /// The table of `bytes` at `address`.
    fn new(memory: &'m GuestRam, address: GuestAddress, bytes: usize) -> Result<Self, ChainFault> {
        match memory.get_slices(address, bytes).next() {
            // Guest memory has holes between its regions: what lies in two of them is not one table.
            Some(Ok(slice)) if slice.len() == bytes => Ok(Self(slice)),
            _ => Err(ChainFault::Address),
        }
    }

    fn get(&self, index: u16) -> Option<Descriptor> {
        let entry = self.0.get_ref(usize::from(index) * DESCRIPTOR).ok()?;
        Some(entry.load())
    }
}

/// The buffers of a chain: those to read from, then those to write to.
#[derive(Debug, Default)]
pub(crate) struct Buffers<'m> {
    pub(crate) slices: Vec<VolatileSlice<'m>>,
    pub(crate) first_writable: usize,
    pub(crate) readable_bytes: usize,
    pub(crate) writable_bytes: usize,
}

/// The buffers of the chain at `head` of the table of `size` descriptors at `table`; `size` at most.
pub(crate) fn walk(
    memory: &GuestRam,
    (table, size): (GuestAddress, u16),
    head: u16,
) -> Result<Buffers<'_>, ChainFault> {
    let mut lookup = Lookup { memory, region: None };
    let mut buffers = Buffers {
        slices: Vec::with_capacity(4),
        ..Buffers::default()
    };
    let mut table = Table::new(memory, table, usize::from(size) * DESCRIPTOR)?;
    let (mut index, mut indirect, mut writing, mut bytes) = (head, false, false, 0_u32);
    // Bounds what one chain costs us, whatever an indirect table claims.
    let mut left = size;
    loop {
        let descriptor = table.get(index).ok_or(ChainFault::Unterminated)?;
        if descriptor.refers_to_indirect_table() {
            // One table, of whole descriptors, at the end of its chain (2.7.5.3.1).
            let length = descriptor.len() as usize;
            if indirect || descriptor.has_next() || length == 0 || !length.is_multiple_of(DESCRIPTOR) {
                return Err(ChainFault::Unterminated);
            }
            table = Table::new(memory, descriptor.addr(), length)?;
            buffers.slices.reserve((length / DESCRIPTOR).min(usize::from(left)));
            (index, indirect) = (0, true);
            continue;
        }
        left = left.checked_sub(1).ok_or(ChainFault::Unterminated)?;
        // 2.7.5.2: no more than 2^32 bytes in total.
        bytes = bytes.checked_add(descriptor.len()).ok_or(ChainFault::Unterminated)?;
        let writable = descriptor.is_write_only();
        if writing && !writable {
            return Err(ChainFault::Order);
        }
        writing = writable;
        lookup.add(&descriptor, &mut buffers.slices)?;
        let length = descriptor.len() as usize;
        if writable {
            buffers.writable_bytes += length;
        } else {
            buffers.readable_bytes += length;
            buffers.first_writable = buffers.slices.len();
        }
        if !descriptor.has_next() {
            return Ok(buffers);
        }
        index = descriptor.next();
    }
}

/// Guest memory, and where the last buffer was.
struct Lookup<'m> {
    memory: &'m GuestRam,
    region: Option<&'m GuestRegionMmap<()>>,
}

impl<'m> Lookup<'m> {
    fn add(&mut self, descriptor: &Descriptor, slices: &mut Vec<VolatileSlice<'m>>) -> Result<(), ChainFault> {
        let (address, length) = (descriptor.addr(), descriptor.len() as usize);
        if length == 0 {
            return Ok(());
        }
        if let Some(slice) = self.in_region(address, length) {
            slices.push(slice);
            return Ok(());
        }
        // It lies in several regions, or nowhere.
        for part in self.memory.get_slices(address, length) {
            slices.push(part.map_err(|_| ChainFault::Address)?);
        }
        Ok(())
    }

    /// The whole of it in one region; the region is remembered.
    fn in_region(&mut self, address: GuestAddress, length: usize) -> Option<VolatileSlice<'m>> {
        if let Some(slice) = self.region.and_then(|region| slice_of(region, address, length)) {
            return Some(slice);
        }
        let region = self.memory.find_region(address)?;
        self.region = Some(region);
        slice_of(region, address, length)
    }
}

fn slice_of(region: &GuestRegionMmap<()>, address: GuestAddress, length: usize) -> Option<VolatileSlice<'_>> {
    region.get_slice(region.to_region_addr(address)?, length).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    // VIRTQ_DESC_F_*, 2.7.5.
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;
    const TABLE: u64 = 0x1000;
    const SIZE: u16 = 4;

    /// Two regions side by side, then a hole, then one more.
    fn memory() -> GuestRam {
        GuestRam::from_ranges(&[
            (GuestAddress(0), 0x10000),
            (GuestAddress(0x10000), 0x10000),
            (GuestAddress(0x40000), 0x10000),
        ])
        .unwrap()
    }

    fn put(memory: &GuestRam, table: u64, descriptors: &[(u64, u32, u16, u16)]) {
        for (index, &(address, length, flags, next)) in (0_u64..).zip(descriptors) {
            let descriptor = Descriptor::new(address, length, flags, next);
            memory.write_obj(descriptor, GuestAddress(table + index * 16)).unwrap();
        }
    }

    fn lengths(memory: &GuestRam) -> Result<Vec<usize>, ChainFault> {
        let buffers = walk(memory, (GuestAddress(TABLE), SIZE), 0)?;
        Ok(buffers.slices.iter().map(VolatileSlice::len).collect())
    }

    #[test]
    fn a_buffer_may_lie_in_two_regions_but_not_in_a_hole() {
        let memory = memory();
        put(
            &memory,
            TABLE,
            &[
                (0x8000, 16, NEXT, 1),
                (0xff00, 0x200, NEXT | WRITE, 2),
                (0x40000, 1, WRITE, 0),
            ],
        );
        assert_eq!(lengths(&memory), Ok(vec![16, 0x100, 0x100, 1]));
        put(&memory, TABLE, &[(0x1ff00, 0x200, 0, 0)]);
        assert_eq!(lengths(&memory), Err(ChainFault::Address));
        put(&memory, TABLE, &[(0x40000, 16, NEXT, 1), (u64::MAX - 8, 16, 0, 0)]);
        assert_eq!(lengths(&memory), Err(ChainFault::Address));
    }

    #[test]
    fn an_indirect_table_is_one_piece_of_memory_at_the_end_of_its_chain() {
        let memory = memory();
        put(&memory, 0x5000, &[(0x8000, 8, NEXT, 1), (0x9000, 9, WRITE, 0)]);
        put(&memory, TABLE, &[(0x7000, 7, NEXT, 1), (0x5000, 32, INDIRECT, 0)]);
        assert_eq!(lengths(&memory), Ok(vec![7, 8, 9]));
        for (address, length, flags) in [
            (0x5000, 32, INDIRECT | NEXT),
            (0x5000, 31, INDIRECT),
            (0x5000, 0, INDIRECT),
            (0x5000, 16, INDIRECT),
        ] {
            put(&memory, TABLE, &[(address, length, flags, 1), (0x7000, 7, 0, 0)]);
            assert_eq!(
                lengths(&memory),
                Err(ChainFault::Unterminated),
                "{flags:#x}, {length} bytes"
            );
        }
        put(&memory, TABLE, &[(0x1fff0, 32, INDIRECT, 0)]);
        assert_eq!(lengths(&memory), Err(ChainFault::Address));
    }

    #[test]
    fn no_chain_is_longer_than_its_queue_or_than_4_gib() {
        let memory = memory();
        let row: Vec<_> = (1..=SIZE + 1).map(|next| (0x8000, 1, NEXT, next)).collect();
        put(&memory, 0x5000, &row);
        put(&memory, 0x5000 + 16 * u64::from(SIZE), &[(0x8000, 1, 0, 0)]);
        put(&memory, TABLE, &[(0x5000, 16 * u32::from(SIZE + 1), INDIRECT, 0)]);
        assert_eq!(lengths(&memory), Err(ChainFault::Unterminated));
        put(&memory, TABLE, &[(0x8000, 1, NEXT, 0)]);
        assert_eq!(lengths(&memory), Err(ChainFault::Unterminated), "it goes round");
        put(&memory, TABLE, &[(0x8000, 1, NEXT, 1), (0x8000, u32::MAX, 0, 0)]);
        assert_eq!(lengths(&memory), Err(ChainFault::Unterminated));
    }

    #[test]
    fn what_is_written_comes_last_even_if_it_is_empty() {
        let memory = memory();
        put(&memory, TABLE, &[(0x8000, 0, NEXT | WRITE, 1), (0x8000, 1, 0, 0)]);
        assert_eq!(lengths(&memory), Err(ChainFault::Order));
    }
}
