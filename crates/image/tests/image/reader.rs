//! A small erofs reader, written from the kernel's `fs/erofs/erofs_fs.h` and sharing nothing with the writer. It looks
//! names up as the kernel does where it can (order, `.` and `..`, offsets), and panics at what is wrong.

use std::collections::BTreeMap;

use crate::{Listing, Seen};

const BLOCK: usize = 4096;

struct Image<'a>(&'a [u8]);

struct Inode {
    at: usize,
    size_on_disk: usize,
    layout: u16,
    xattr_icount: u16,
    mode: u16,
    nlink: u32,
    size: usize,
    u: u32,
    uid: u32,
    gid: u32,
    mtime: (i64, u32),
}

/// Everything in the image.
pub(crate) fn list(image: &[u8]) -> Listing {
    let image = Image(image);
    assert_eq!(image.u32(1024), 0xe0f5_e1e2, "magic");
    assert_eq!(image.0[1024 + 12], 12, "blkszbits");
    assert_eq!(image.u32(1024 + 80), 0, "feature_incompat");
    assert_eq!(image.u32(1024 + 36) as usize * BLOCK, image.0.len(), "blocks");
    assert_eq!(image.u32(1024 + 40), 0, "meta_blkaddr");
    let root = u64::from(image.u16(1024 + 14));
    let mut listing = Listing::new();
    let mut inodes = BTreeMap::new();
    image.walk(root, root, Vec::new(), &mut listing, &mut inodes);
    assert_eq!(image.u64(1024 + 16), inodes.len() as u64, "inos");
    for (nid, (nlink, names)) in inodes {
        assert_eq!(nlink, names, "i_nlink of nid {nid} and its names");
    }
    listing
}

impl Image<'_> {
    fn u16(&self, at: usize) -> u16 {
        u16::from_le_bytes(self.0[at..at + 2].try_into().unwrap())
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.0[at..at + 4].try_into().unwrap())
    }

    fn u64(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.0[at..at + 8].try_into().unwrap())
    }

    fn inode(&self, nid: u64) -> Inode {
        let at = usize::try_from(nid).unwrap() * 32;
        let format = self.u16(at);
        let (layout, extended) = (format >> 1 & 7, format & 1 == 1);
        let common = Inode {
            at,
            size_on_disk: if extended { 64 } else { 32 },
            layout,
            xattr_icount: self.u16(at + 2),
            mode: self.u16(at + 4),
            nlink: u32::from(self.u16(at + 6)),
            size: self.u32(at + 8) as usize,
            u: self.u32(at + 16),
            uid: u32::from(self.u16(at + 24)),
            gid: u32::from(self.u16(at + 26)),
            mtime: (self.u64(1024 + 24).cast_signed(), self.u32(1024 + 32)),
        };
        if !extended {
            return common;
        }
        Inode {
            nlink: self.u32(at + 44),
            size: usize::try_from(self.u64(at + 8)).unwrap(),
            uid: self.u32(at + 24),
            gid: self.u32(at + 28),
            mtime: (self.u64(at + 32).cast_signed(), self.u32(at + 40)),
            ..common
        }
    }

    fn data(&self, inode: &Inode) -> Vec<u8> {
        let first = inode.u as usize * BLOCK;
        match inode.layout {
            0 if inode.size == 0 => Vec::new(),
            0 => {
                let padding = first + inode.size..first + inode.size.next_multiple_of(BLOCK);
                assert!(
                    self.0[padding].iter().all(|&byte| byte == 0),
                    "bytes after the end of a file"
                );
                self.0[first..first + inode.size].to_vec()
            }
            2 => {
                assert_ne!(inode.mode >> 12, 0o10, "inline contents of a regular file");
                let whole = inode.size / BLOCK * BLOCK;
                let xattrs = if inode.xattr_icount == 0 {
                    0
                } else {
                    12 + (usize::from(inode.xattr_icount) - 1) * 4
                };
                let tail = inode.at + inode.size_on_disk + xattrs;
                let tail_len = inode.size - whole;
                assert!(
                    tail_len > 0 && tail / BLOCK == (tail + tail_len - 1) / BLOCK,
                    "an inline tail over two blocks"
                );
                let blocks = if whole > 0 { &self.0[first..first + whole] } else { &[] };
                [blocks, &self.0[tail..tail + tail_len]].concat()
            }
            other => panic!("data layout {other}"),
        }
    }

    fn xattrs(&self, inode: &Inode) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let mut xattrs = BTreeMap::new();
        if inode.xattr_icount == 0 {
            return xattrs;
        }
        let start = inode.at + inode.size_on_disk;
        assert_eq!(self.0[start + 4], 0, "h_shared_count");
        let end = start + 12 + (usize::from(inode.xattr_icount) - 1) * 4;
        let mut at = start + 12;
        while at < end {
            let (name_len, value_len) = (usize::from(self.0[at]), usize::from(self.u16(at + 2)));
            let prefix = match self.0[at + 1] {
                1 => "user.",
                2 => "system.posix_acl_access",
                3 => "system.posix_acl_default",
                4 => "trusted.",
                6 => "security.",
                other => panic!("e_name_index {other}"),
            };
            let name = &self.0[at + 4..at + 4 + name_len];
            let value = &self.0[at + 4 + name_len..at + 4 + name_len + value_len];
            xattrs.insert([prefix.as_bytes(), name].concat(), value.to_vec());
            at += (4 + name_len + value_len).next_multiple_of(4);
        }
        assert_eq!(at, end, "i_xattr_icount");
        xattrs
    }

    fn entries(&self, directory: &[u8]) -> Vec<(Vec<u8>, u64, u8)> {
        let mut entries = Vec::new();
        for block in directory.chunks(BLOCK) {
            let u16_at = |at: usize| usize::from(u16::from_le_bytes(block[at..at + 2].try_into().unwrap()));
            let count = u16_at(8) / 12;
            for index in 0..count {
                let at = index * 12;
                let nid = u64::from_le_bytes(block[at..at + 8].try_into().unwrap());
                let from = u16_at(at + 8);
                let to = if index + 1 < count {
                    u16_at(at + 20)
                } else {
                    block.len()
                };
                let name = block[from..to].split(|&byte| byte == 0).next().unwrap().to_vec();
                entries.push((name, nid, block[at + 10]));
            }
        }
        assert!(entries.is_sorted_by(|a, b| a.0 < b.0), "names out of order");
        entries
    }

    fn walk(
        &self,
        nid: u64,
        parent: u64,
        path: Vec<u8>,
        listing: &mut Listing,
        inodes: &mut BTreeMap<u64, (u32, u32)>,
    ) {
        let inode = self.inode(nid);
        let data = self.data(&inode);
        inodes.entry(nid).or_insert((inode.nlink, 0)).1 += 1;
        let device = format!("{}:{}", inode.u >> 8 & 0xfff, inode.u & 0xff | inode.u >> 12 & 0xfff00).into_bytes();
        let (kind, file_type) = match inode.mode >> 12 {
            0o10 => ('f', 1),
            0o04 => ('d', 2),
            0o02 => ('c', 3),
            0o06 => ('b', 4),
            0o01 => ('p', 5),
            0o12 => ('l', 7),
            other => panic!("type {other:o}"),
        };
        if kind == 'd' {
            for (name, child, child_type) in self.entries(&data) {
                match name.as_slice() {
                    b"." => {
                        assert_eq!((child, child_type), (nid, file_type));
                        inodes.entry(nid).or_default().1 += 1;
                    }
                    b".." => {
                        assert_eq!((child, child_type), (parent, 2));
                        // The root is its own parent, which is not counted.
                        inodes.entry(parent).or_default().1 += u32::from(parent != nid);
                    }
                    _ => {
                        let below = if path.is_empty() {
                            Vec::new()
                        } else {
                            [&path[..], b"/"].concat()
                        };
                        self.walk(child, nid, [&below, &name[..]].concat(), listing, inodes);
                        let expected = self.inode(child).mode >> 12;
                        let types = [(0o10, 1), (0o04, 2), (0o02, 3), (0o06, 4), (0o01, 5), (0o12, 7)];
                        assert!(
                            types.contains(&(expected, child_type)),
                            "file_type {child_type} of {expected:o}"
                        );
                    }
                }
            }
        }
        let seen = Seen {
            kind,
            mode: inode.mode & 0o7777,
            uid: inode.uid,
            gid: inode.gid,
            mtime: inode.mtime,
            nlink: inode.nlink,
            xattrs: self.xattrs(&inode),
            data: match kind {
                'c' | 'b' => device,
                'd' => Vec::new(),
                _ => data,
            },
        };
        listing.insert(path, seen);
    }
}
