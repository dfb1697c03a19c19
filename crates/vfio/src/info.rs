//! What the kernel tells in structures of a size that it alone knows: the structure, and a chain of capabilities behind it
//! (`struct vfio_info_cap_header`). Pure but for the request itself.

use std::os::fd::AsFd;

use crate::uapi;
use crate::{VfioError, failed};

/// Bytes before a capability's own: its id, its version, where the next one is.
const HEADER: usize = 8;

/// How often the kernel may say that it needs more room: what it tells may grow in between.
const TRIES: usize = 4;

/// Makes a request whose answer begins with `head`, of which the first word is the size of the buffer.
pub(crate) fn ask(fd: impl AsFd, request: u32, call: &'static str, head: &[u32]) -> Result<Vec<u8>, VfioError> {
    let mut room = size_of_val(head);
    for _ in 0..TRIES {
        let mut buffer: Vec<u8> = head.iter().flat_map(|word| word.to_ne_bytes()).collect();
        buffer.resize(room, 0);
        let size = u32::try_from(room).map_err(|_| VfioError::Other("the kernel has too much to tell"))?;
        buffer[..4].copy_from_slice(&size.to_ne_bytes());
        // SAFETY: the request writes no more than the buffer, whose size is in its first word.
        unsafe { uapi::call(fd.as_fd(), request, buffer.as_mut_ptr()) }.map_err(failed(call))?;
        match u32_at(&buffer, 0).and_then(|needed| usize::try_from(needed).ok()) {
            Some(needed) if needed > room => room = needed,
            _ => return Ok(buffer),
        }
    }
    Err(VfioError::Other(
        "what the kernel tells of a function or an IOMMU keeps growing",
    ))
}

/// The capabilities of an answer, of which the first begins at `first`, each with its id and its bytes, of which only those that belong to
/// it mean anything. Ends where the chain does, or leaves the answer, or goes back.
pub(crate) fn capabilities(buffer: &[u8], first: u32) -> impl Iterator<Item = (u16, &[u8])> {
    let mut at = usize::try_from(first).unwrap_or(0);
    std::iter::from_fn(move || {
        let id = u16_at(buffer, at).filter(|_| at > 0)?;
        let next = usize::try_from(u32_at(buffer, at.checked_add(4)?)?).ok()?;
        let body = buffer.get(at + HEADER..)?;
        at = if next > at { next } else { 0 };
        Some((id, body))
    })
}

pub(crate) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at.checked_add(2)?)?;
    bytes.try_into().ok().map(u16::from_ne_bytes)
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    bytes.try_into().ok().map(u32::from_ne_bytes)
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    bytes.try_into().ok().map(u64::from_ne_bytes)
}

/// Pairs of 64-bit numbers after their count and a reserved word, as both ranges of addresses and areas of a region are told.
pub(crate) fn pairs(body: &[u8]) -> Vec<(u64, u64)> {
    let count = u32_at(body, 0)
        .and_then(|count| usize::try_from(count).ok())
        .unwrap_or(0);
    let pair = |at| Some((u64_at(body, at)?, u64_at(body, at + 8)?));
    // What is not in the answer is not there, whatever the count says.
    (0..count.min(body.len() / 16))
        .map_while(|index| pair(8 + 16 * index))
        .collect()
}

/// A capability as the kernel writes it, for tests.
#[cfg(test)]
pub(crate) fn capability(id: u16, next: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = id.to_ne_bytes().to_vec();
    bytes.extend(1_u16.to_ne_bytes());
    bytes.extend(next.to_ne_bytes());
    bytes.extend(body);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chain_is_followed_to_its_end() {
        let mut buffer = vec![0; 16];
        buffer.extend(capability(1, 32, &[7; 8]));
        buffer.extend(capability(3, 0, &[8; 4]));
        let found: Vec<_> = capabilities(&buffer, 16).map(|(id, body)| (id, body[0])).collect();
        assert_eq!(found, [(1, 7), (3, 8)]);
        assert_eq!(capabilities(&buffer, 0).count(), 0);
    }

    #[test]
    fn a_chain_that_leads_nowhere_ends() {
        for next in [16, 8, 1000, u32::MAX] {
            let mut buffer = vec![0; 16];
            buffer.extend(capability(1, next, &[7; 8]));
            assert_eq!(capabilities(&buffer, 16).count(), 1, "{next}");
        }
        assert_eq!(capabilities(&[0; 20], 16).count(), 0, "cut short");
        assert_eq!(capabilities(&[0; 20], u32::MAX).count(), 0);
    }

    #[test]
    fn counts_that_are_too_large_give_what_is_there() {
        let mut body = u32::MAX.to_ne_bytes().to_vec();
        body.extend([0; 4]);
        body.extend(5_u64.to_ne_bytes());
        body.extend(9_u64.to_ne_bytes());
        body.extend([1; 8]);
        assert_eq!(pairs(&body), [(5, 9)]);
        assert_eq!(pairs(&[1, 0, 0]), []);
    }
}
