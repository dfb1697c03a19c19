//! What the tests of the library have in common: the built library behind dlopen(3), and a server that keeps buffers in its own memory.

pub(crate) mod library;
pub(crate) mod server;
