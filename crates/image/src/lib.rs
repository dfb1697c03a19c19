//! OCI images in, read-only uncompressed erofs images out, stored once by digest.
//!
//! The way of an import: [`source`] opens what the user names (a layout directory, a layout in a tar, a docker-archive)
//! as named blobs; [`manifest`] selects the linux/amd64 image in it and checks what it says; [`layer`] checks and
//! decompresses each layer and applies its entries, read by [`tar`], to an in-memory [`tree`] whose file contents lie in
//! a spool file; [`erofs`] writes the tree as one image; [`store`] keeps images by digest and names them.
//!
//! Nothing is ever unpacked into the host's file system, so no name in an image can reach it. The crate deliberately
//! knows nothing of VMs, of how the image is attached to one, and of registries.

mod document;
mod erofs;
mod error;
mod file;
mod import;
mod layer;
mod limits;
mod manifest;
mod reference;
mod source;
mod steps;
mod stop;
mod store;
mod stream;
mod tar;
mod tree;

pub use document::{Descriptor, Document, INDEX_TYPES, Index, MANIFEST_TYPES, Manifest, Platform};
pub use error::Error;
pub use import::{Phase, Progress, convert_bytes};
pub use limits::Limits;
pub use manifest::ImageConfig;
pub use reference::Reference;
pub use store::{Claim, Export, Footprint, Image, Listing, Part, Partial, Prune, Pruned, Pulled, Staged, Store, Usage};
