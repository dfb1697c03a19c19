//! Writes a tree as an erofs image, uncompressed and laid out for DAX.
//!
//! ```text
//! block 0      1024 unused bytes, the superblock (128), then the first inodes; the root directory's is the first
//! block 1..    inodes, each with its extended attributes, then (directories, symbolic links) its tail inline
//! block m..    the whole blocks of directories and long symbolic links
//! block d..    contents of regular files, each from a block boundary, its last block filled with zeros
//! ```
//!
//! Blocks are 4096 bytes, the page size, and contents of regular files are never inline (EROFS_INODE_FLAT_PLAIN), so
//! that every page of a file is a page of the image and can be mapped. Inodes stand in the order of a depth-first walk
//! with sorted names and nothing depends on time or addresses: the same tree gives the same bytes.
//!
//! [`ondisk`] has the structures, [`inode`] turns a tree into inodes and directory blocks, [`write`] places and writes
//! them, [`xattr`] has the inline attributes. None of them knows of OCI.

mod inode;
pub(crate) mod ondisk;
mod write;
mod xattr;

pub(crate) use write::write;
