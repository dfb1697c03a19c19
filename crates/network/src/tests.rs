//! The network on this machine's kernel: a host, the world around it and guests, each a network namespace. A guest's
//! kernel is joined to its slot's TAP as a VMM would, with checksums left undone and large packets whole. Needs root.

mod egress;
mod isolation;
mod life;
mod traffic;
mod world;
