//! Memory that a client of a forwarded accelerator shares with its server: a header, pairs of rings, and an arena for what is large.
//!
//! Neither side trusts the other. Where everything is follows from three numbers ([`Geometry`]); the server keeps those in its own memory,
//! and the client reads them from the header once and checks them. What is handed over in the arena is an offset and a length, which
//! the other side checks ([`Window::slice`]); who has which part of it is known by the client alone ([`Arena`]). A server that dies
//! changes the header, by the kernel's hand ([`Holder`]), so clients see it by a load ([`Life`]).
//!
//! This crate knows neither a call nor an API, and not where the memory comes from: any mapping will do, of a memfd ([`Window::create`])
//! or of a DAX file of a virtio-pmem device, whose file system is made here as well ([`image`]). The table of the layout is in
//! docs/accel-window.md.

mod arena;
mod error;
mod geometry;
mod greeting;
mod holder;
pub mod image;
mod life;
#[cfg(test)]
mod tests;
mod window;

pub use arena::{Arena, Block};
pub use error::Error;
pub use geometry::{Geometry, PAGE};
pub use greeting::Greeting;
pub use holder::Holder;
pub use life::Life;
pub use window::{ClientPair, ServerPair, Side, VERSIONS, Window, map, map_file};
