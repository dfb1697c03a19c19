//! What driver and device say to each other (5.15.3 to 5.15.6): numbers, and the layouts of requests, answers and configuration space.
//! Knows no memory.

use std::io::Read;

use virtio::buffers::Cursor;

/// Feature bits (5.15.3).
pub(crate) const VIRTIO_MEM_F_ACPI_PXM: u32 = 0;
pub(crate) const VIRTIO_MEM_F_UNPLUGGED_INACCESSIBLE: u32 = 1;

/// Request types (5.15.6).
pub(crate) const VIRTIO_MEM_REQ_PLUG: u16 = 0;
pub(crate) const VIRTIO_MEM_REQ_UNPLUG: u16 = 1;
pub(crate) const VIRTIO_MEM_REQ_UNPLUG_ALL: u16 = 2;
pub(crate) const VIRTIO_MEM_REQ_STATE: u16 = 3;

/// `struct virtio_mem_req`: type at 0, address at 8, number of blocks at 16, padding between and behind.
pub(crate) const REQUEST_BYTES: usize = 24;

/// `struct virtio_mem_resp`: type at 0, state at 8.
pub(crate) const RESPONSE_BYTES: usize = 10;

/// What a driver asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Plug(Blocks),
    Unplug(Blocks),
    UnplugAll,
    State(Blocks),
    /// A type that there is not.
    Unknown,
}

/// Consecutive blocks, as the driver names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Guest physical address of the first.
    pub(crate) addr: u64,
    /// How many.
    pub(crate) nb_blocks: u16,
}

/// What it is answered (5.15.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Response {
    /// `VIRTIO_MEM_RESP_ACK`; with a state where that was asked for.
    Ack(BlockState),
    /// `VIRTIO_MEM_RESP_NACK`: more than the device wants plugged.
    Nack,
    /// `VIRTIO_MEM_RESP_BUSY`: try again later.
    Busy,
    /// `VIRTIO_MEM_RESP_ERROR`: the request contradicts itself or the state of the blocks.
    Error,
}

/// The state of blocks (5.15.6.4). It is 0 in answers to all that is no STATE request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum BlockState {
    #[default]
    Plugged = 0,
    Unplugged = 1,
    Mixed = 2,
}

impl Request {
    /// Reads one; `None` if the driver sends less than a request.
    pub(crate) fn read(reader: &mut Cursor<'_, '_>) -> Option<Self> {
        let mut bytes = [0; REQUEST_BYTES];
        reader.read_exact(&mut bytes).ok()?;
        let [t0, t1, _, _, _, _, _, _, addr @ .., n0, n1, _, _, _, _, _, _] = bytes;
        let blocks = Blocks {
            addr: u64::from_le_bytes(addr),
            nb_blocks: u16::from_le_bytes([n0, n1]),
        };
        Some(match u16::from_le_bytes([t0, t1]) {
            VIRTIO_MEM_REQ_PLUG => Self::Plug(blocks),
            VIRTIO_MEM_REQ_UNPLUG => Self::Unplug(blocks),
            VIRTIO_MEM_REQ_UNPLUG_ALL => Self::UnplugAll,
            VIRTIO_MEM_REQ_STATE => Self::State(blocks),
            _ => Self::Unknown,
        })
    }
}

impl Response {
    pub(crate) fn bytes(self) -> [u8; RESPONSE_BYTES] {
        let (kind, state) = match self {
            Self::Ack(state) => (0_u8, state),
            Self::Nack => (1, BlockState::default()),
            Self::Busy => (2, BlockState::default()),
            Self::Error => (3, BlockState::default()),
        };
        let mut bytes = [0; RESPONSE_BYTES];
        (bytes[0], bytes[8]) = (kind, state as u8);
        bytes
    }
}

/// `struct virtio_mem_config` (5.15.4).
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConfigSpace {
    pub(crate) block_size: u64,
    pub(crate) node_id: u16,
    pub(crate) addr: u64,
    pub(crate) region_size: u64,
    pub(crate) usable_region_size: u64,
    pub(crate) plugged_size: u64,
    pub(crate) requested_size: u64,
}

impl ConfigSpace {
    const BYTES: usize = 56;

    fn bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let fields: [(usize, &[u8]); 7] = [
            (0, &self.block_size.to_le_bytes()),
            (8, &self.node_id.to_le_bytes()),
            (16, &self.addr.to_le_bytes()),
            (24, &self.region_size.to_le_bytes()),
            (32, &self.usable_region_size.to_le_bytes()),
            (40, &self.plugged_size.to_le_bytes()),
            (48, &self.requested_size.to_le_bytes()),
        ];
        for (at, value) in fields {
            bytes[at..at + value.len()].copy_from_slice(value);
        }
        bytes
    }

    /// Reads; what lies beyond stays as it is.
    pub(crate) fn read(&self, offset: usize, data: &mut [u8]) {
        let bytes = self.bytes();
        let rest = bytes.get(offset..).unwrap_or_default();
        for (byte, value) in data.iter_mut().zip(rest) {
            *byte = *value;
        }
    }
}
