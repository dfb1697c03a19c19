//! What driver and device say to each other (5.5.2 to 5.5.6): numbers, and the layouts of configuration space and requests. Knows no memory.

use std::io::Read;

use ::device::CreateError;
use virtio::buffers::Cursor;
use vmm_api::devices::BALLOON_PAGE;

/// Feature bits (5.5.3).
pub(crate) const VIRTIO_BALLOON_F_MUST_TELL_HOST: u32 = 0;
pub(crate) const VIRTIO_BALLOON_F_DEFLATE_ON_OOM: u32 = 2;
pub(crate) const VIRTIO_BALLOON_F_PAGE_REPORTING: u32 = 5;

/// Queues (5.5.2). `reporting_vq` is 4 there and exists only with its feature, as do `statsq` and `free_page_vq` before it: drivers count those
/// alone that there are, Linux's among them, so that without these two it is the third.
pub(crate) const INFLATE: u16 = 0;
pub(crate) const DEFLATE: u16 = 1;
pub(crate) const REPORTING: u16 = 2;

/// Of each of them. Linux reports 32 ranges at a time, and inflates by 256 pages in one buffer.
pub(crate) const QUEUE_SIZES: [u16; 3] = [128; 3];

/// Bytes of a page, whatever the guest's are (5.5.6).
pub(crate) const PAGE: u64 = BALLOON_PAGE.bytes();

/// Bytes of a page's number, little-endian.
const NUMBER: usize = size_of::<u32>();

/// So many bytes as pages.
///
/// # Errors
/// They are no whole pages, or more than the configuration space can say.
pub(crate) fn pages_of(bytes: u64) -> Result<u32, CreateError> {
    let whole = bytes.is_multiple_of(PAGE).then_some(bytes / PAGE);
    whole.and_then(|pages| u32::try_from(pages).ok()).ok_or_else(|| {
        let most = u64::from(u32::MAX) * PAGE;
        CreateError::Value(format!(
            "a balloon of {bytes} bytes was asked for: give a multiple of {PAGE}, up to {most}"
        ))
    })
}

/// Numbers of pages, as many as there are and `most` at most.
pub(crate) fn read_numbers(reader: &mut Cursor<'_, '_>, most: usize) -> Vec<u32> {
    let count = (reader.remaining() / NUMBER).min(most);
    let mut bytes = vec![0; count * NUMBER];
    let read = reader.read(&mut bytes).unwrap_or(0);
    let numbers = bytes[..read].as_chunks::<NUMBER>().0;
    numbers.iter().map(|number| u32::from_le_bytes(*number)).collect()
}

/// `struct virtio_balloon_config` (5.5.4), of which the last two fields exist with features that are not offered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConfigSpace {
    /// What the guest is to do without.
    pub(crate) num_pages: u32,
    /// What it does without, as its driver writes it.
    pub(crate) actual: u32,
}

impl ConfigSpace {
    const ACTUAL: usize = NUMBER;
    const BYTES: usize = 2 * NUMBER;

    fn bytes(&self) -> [u8; Self::BYTES] {
        let [a, b, c, d] = self.num_pages.to_le_bytes();
        let [e, f, g, h] = self.actual.to_le_bytes();
        [a, b, c, d, e, f, g, h]
    }

    /// Reads; what lies beyond stays as it is.
    pub(crate) fn read(&self, offset: usize, data: &mut [u8]) {
        let bytes = self.bytes();
        let rest = bytes.get(offset..).unwrap_or_default();
        for (byte, value) in data.iter_mut().zip(rest) {
            *byte = *value;
        }
    }

    /// Writes to `actual`, at any width; the driver can write nothing else.
    pub(crate) fn write(&mut self, offset: usize, data: &[u8]) {
        let mut actual = self.actual.to_le_bytes();
        for (at, value) in data.iter().enumerate() {
            let at = offset.checked_add(at).and_then(|at| at.checked_sub(Self::ACTUAL));
            if let Some(byte) = at.and_then(|at| actual.get_mut(at)) {
                *byte = *value;
            }
        }
        self.actual = u32::from_le_bytes(actual);
    }
}
