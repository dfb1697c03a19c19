//! Inline extended attributes: `struct erofs_xattr_ibody_header`, then `struct erofs_xattr_entry` with name and value
//! for each, right after the inode.

use std::collections::BTreeMap;

/// `sizeof(struct erofs_xattr_ibody_header)`; no shared attributes, no name filter.
const IBODY_HEADER: usize = 12;

/// A name's prefix is a number on disk (`EROFS_XATTR_INDEX_*`); the ACLs' whole names are.
const PREFIXES: [(&[u8], u8); 5] = [
    (b"user.", 1),
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"trusted.", 4),
    (b"security.", 6),
];

/// Attributes as they follow the inode: empty if there is none. A name that erofs has no prefix for (`com.apple.*`) is
/// one that no Linux file system would have kept: it is left out, with a warning.
pub(super) fn encode(xattrs: &BTreeMap<Vec<u8>, Vec<u8>>) -> Vec<u8> {
    let mut out = vec![0; IBODY_HEADER];
    for (name, value) in xattrs {
        let Some((index, rest)) = split(name) else {
            log::warn!(
                "left out the extended attribute {:?}: Linux has no such namespace",
                crate::Error::show(name)
            );
            continue;
        };
        // Limits and the prefix make both fit: the tar reader has checked the value, split() the name.
        let (Ok(name_len), Ok(value_len)) = (u8::try_from(rest.len()), u16::try_from(value.len())) else {
            continue;
        };
        out.push(name_len);
        out.push(index);
        out.extend(value_len.to_le_bytes());
        out.extend(rest);
        out.extend(value);
        // EROFS_XATTR_ALIGN
        out.resize(out.len().next_multiple_of(4), 0);
    }
    if out.len() == IBODY_HEADER { Vec::new() } else { out }
}

fn split(name: &[u8]) -> Option<(u8, &[u8])> {
    let (prefix, index) = PREFIXES.iter().find(|(prefix, _)| name.starts_with(prefix))?;
    let rest = &name[prefix.len()..];
    let whole = !prefix.ends_with(b".");
    // XATTR_NAME_MAX is 255 with the prefix.
    (whole == rest.is_empty() && name.len() <= 255 && !name.contains(&0)).then_some((*index, rest))
}

/// `i_xattr_icount` of attributes so encoded.
pub(super) fn icount(encoded: &[u8]) -> u16 {
    match encoded.len() {
        0 => 0,
        len => u16::try_from((len - IBODY_HEADER) / 4 + 1).unwrap_or(u16::MAX),
    }
}
