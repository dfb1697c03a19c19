//! Requests of FUSE, as a guest's kernel writes them.

/// A request of FUSE.
pub(crate) fn request(opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(40 + body.len()).unwrap();
    let mut request = Vec::new();
    request.extend(length.to_le_bytes());
    request.extend(opcode.to_le_bytes());
    request.extend(7_u64.to_le_bytes());
    request.extend(node.to_le_bytes());
    request.extend([0; 16]);
    request.extend(body);
    request
}
