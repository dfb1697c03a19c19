//! Features and configuration space (5.1.3, 5.1.4): a table of fields.

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_CTRL_VQ, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MAC,
    VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU,
};
use vmm_api::devices::NetConfig;

/// Entries of a receive or transmit queue.
pub(crate) const QUEUE_SIZE: u16 = 256;

/// Entries of the control queue; a driver has one command under way.
pub(crate) const CONTROL_SIZE: u16 = 16;

/// What IPv6 needs of any link (RFC 8200, 5).
pub(crate) const MIN_MTU: u16 = 1280;

/// The longest IP packet.
pub(crate) const MAX_MTU: u16 = 65535;

/// Bytes of `struct virtio_net_hdr` with `num_buffers`, which VIRTIO_F_VERSION_1 makes part of it (5.1.6).
pub(crate) const HEADER: usize = 12;

/// Where `num_buffers` is in the header.
pub(crate) const NUM_BUFFERS: usize = 10;

/// Ethernet's header and one VLAN tag.
const ETHERNET: usize = 14 + 4;

/// The largest packet with its header, where segmentation is offloaded.
pub(crate) const LARGEST: usize = HEADER + ETHERNET + 65535;

/// Bytes up to and including `mtu`.
const LENGTH: usize = 12;

/// Offsets in `struct virtio_net_config`.
mod field {
    pub(super) const MAC: usize = 0;
    pub(super) const MAX_VIRTQUEUE_PAIRS: usize = 8;
    pub(super) const MTU: usize = 10;
}

/// What a driver has accepted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Features(pub(crate) u64);

impl Features {
    /// Those offered by a device with so many queue pairs.
    pub(crate) fn offered(pairs: usize) -> Self {
        let mut bits = 0;
        for bit in [
            VIRTIO_NET_F_CSUM,
            VIRTIO_NET_F_GUEST_CSUM,
            VIRTIO_NET_F_MTU,
            VIRTIO_NET_F_MAC,
            VIRTIO_NET_F_GUEST_TSO4,
            VIRTIO_NET_F_GUEST_TSO6,
            VIRTIO_NET_F_GUEST_ECN,
            VIRTIO_NET_F_HOST_TSO4,
            VIRTIO_NET_F_HOST_TSO6,
            VIRTIO_NET_F_HOST_ECN,
            VIRTIO_NET_F_MRG_RXBUF,
        ] {
            bits |= 1 << bit;
        }
        if pairs > 1 {
            bits |= 1 << VIRTIO_NET_F_MQ | 1 << VIRTIO_NET_F_CTRL_VQ;
        }
        Self(bits)
    }

    pub(crate) fn has(self, bit: u32) -> bool {
        self.0 & (1 << bit) != 0
    }

    /// Receive buffers may be joined for one packet.
    pub(crate) fn mergeable(self) -> bool {
        self.has(VIRTIO_NET_F_MRG_RXBUF)
    }

    /// The largest packet, header included, that the driver has to have room for (5.1.6.3.1).
    pub(crate) fn largest_received(self, mtu: u16) -> usize {
        if self.has(VIRTIO_NET_F_GUEST_TSO4) || self.has(VIRTIO_NET_F_GUEST_TSO6) {
            LARGEST
        } else {
            HEADER + ETHERNET + usize::from(mtu)
        }
    }

    /// The number of the control queue: after the pairs that the driver can see (5.1.2).
    pub(crate) fn control_queue(self, pairs: usize) -> Option<usize> {
        if !self.has(VIRTIO_NET_F_CTRL_VQ) {
            return None;
        }
        Some(if self.has(VIRTIO_NET_F_MQ) { 2 * pairs } else { 2 })
    }
}

/// The configuration space.
pub(crate) struct ConfigSpace([u8; LENGTH]);

impl ConfigSpace {
    pub(crate) fn new(config: &NetConfig) -> Self {
        let mut space = Self([0; LENGTH]);
        let pairs = u16::try_from(config.taps.len()).unwrap_or(u16::MAX);
        space.set(field::MAC, &config.mac.0);
        space.set(field::MAX_VIRTQUEUE_PAIRS, &pairs.to_le_bytes());
        space.set(field::MTU, &config.mtu.to_le_bytes());
        space
    }

    /// Reads; what lies beyond stays as it is.
    pub(crate) fn read(&self, offset: usize, data: &mut [u8]) {
        let rest = self.0.get(offset..).unwrap_or_default();
        for (byte, value) in data.iter_mut().zip(rest) {
            *byte = *value;
        }
    }

    fn set(&mut self, offset: usize, value: &[u8]) {
        self.0[offset..offset + value.len()].copy_from_slice(value);
    }
}
