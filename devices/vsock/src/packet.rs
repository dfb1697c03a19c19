//! The packet header and its numbers (virtio 1.2, 5.10.6). Knows no connection.

/// The length of `struct virtio_vsock_hdr`.
pub(crate) const HEADER_LEN: usize = 44;

/// The most payload that the device puts into one packet.
pub(crate) const MAX_PAYLOAD: usize = 64 << 10;

/// The context id of the host (5.10.4).
pub(crate) const HOST_CID: u64 = 2;

/// `VIRTIO_VSOCK_TYPE_STREAM`.
pub(crate) const TYPE_STREAM: u16 = 1;

/// `VIRTIO_VSOCK_SHUTDOWN_F_RECEIVE`: the sender will receive no more.
pub(crate) const SHUTDOWN_RECEIVE: u32 = 1;

/// `VIRTIO_VSOCK_SHUTDOWN_F_SEND`: the sender will send no more.
pub(crate) const SHUTDOWN_SEND: u32 = 2;

/// Both directions.
pub(crate) const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// What a packet asks for (`VIRTIO_VSOCK_OP_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub(crate) enum Op {
    Request = 1,
    Response = 2,
    Rst = 3,
    Shutdown = 4,
    Rw = 5,
    CreditUpdate = 6,
    CreditRequest = 7,
}

impl Op {
    /// The operation with this number, if there is one.
    pub(crate) fn from_number(number: u16) -> Option<Self> {
        [
            Self::Request,
            Self::Response,
            Self::Rst,
            Self::Shutdown,
            Self::Rw,
            Self::CreditUpdate,
            Self::CreditRequest,
        ]
        .into_iter()
        .find(|op| *op as u16 == number)
    }
}

/// `struct virtio_vsock_hdr`, field by field in its order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) src_cid: u64,
    pub(crate) dst_cid: u64,
    pub(crate) src_port: u32,
    pub(crate) dst_port: u32,
    pub(crate) len: u32,
    pub(crate) kind: u16,
    pub(crate) op: u16,
    pub(crate) flags: u32,
    pub(crate) buf_alloc: u32,
    pub(crate) fwd_cnt: u32,
}

impl Header {
    /// Reads the little-endian layout.
    pub(crate) fn decode(bytes: &[u8; HEADER_LEN]) -> Self {
        let mut fields = Fields(bytes);
        Self {
            src_cid: u64::from_le_bytes(fields.take()),
            dst_cid: u64::from_le_bytes(fields.take()),
            src_port: u32::from_le_bytes(fields.take()),
            dst_port: u32::from_le_bytes(fields.take()),
            len: u32::from_le_bytes(fields.take()),
            kind: u16::from_le_bytes(fields.take()),
            op: u16::from_le_bytes(fields.take()),
            flags: u32::from_le_bytes(fields.take()),
            buf_alloc: u32::from_le_bytes(fields.take()),
            fwd_cnt: u32::from_le_bytes(fields.take()),
        }
    }

    /// Writes the little-endian layout.
    pub(crate) fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let fields: [&[u8]; 10] = [
            &self.src_cid.to_le_bytes(),
            &self.dst_cid.to_le_bytes(),
            &self.src_port.to_le_bytes(),
            &self.dst_port.to_le_bytes(),
            &self.len.to_le_bytes(),
            &self.kind.to_le_bytes(),
            &self.op.to_le_bytes(),
            &self.flags.to_le_bytes(),
            &self.buf_alloc.to_le_bytes(),
            &self.fwd_cnt.to_le_bytes(),
        ];
        let mut at = 0;
        for field in fields {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        }
        bytes
    }
}

/// The bytes of a header that are still to be read.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut field = [0; N];
        let (head, rest) = self.0.split_at(N);
        field.copy_from_slice(head);
        self.0 = rest;
        field
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layout_is_the_specifications() {
        let header = Header {
            src_cid: 2,
            dst_cid: 3,
            src_port: 0x0403_0201,
            dst_port: 1024,
            len: 9,
            kind: TYPE_STREAM,
            op: Op::Rw as u16,
            flags: 7,
            buf_alloc: 0x1_0000,
            fwd_cnt: 0xffff_fffe,
        };
        let bytes = header.encode();
        assert_eq!(bytes[16..20], [1, 2, 3, 4], "src_port at 16");
        assert_eq!(bytes[24..28], [9, 0, 0, 0], "len at 24");
        assert_eq!(bytes[28..32], [1, 0, 5, 0], "type at 28, op at 30");
        assert_eq!(bytes[40..44], [0xfe, 0xff, 0xff, 0xff], "fwd_cnt at 40");
        assert_eq!(Header::decode(&bytes), header);
    }

    #[test]
    fn unknown_operations_have_no_name() {
        assert_eq!(Op::from_number(5), Some(Op::Rw));
        assert_eq!(Op::from_number(0), None);
        assert_eq!(Op::from_number(8), None);
    }
}
