//! Netlink: requests to the kernel, one at a time, and what is done with links by them. Knows neither what a link is for nor
//! whose it is.

pub mod links;
pub mod socket;

pub use links::{Link, Links};
pub use socket::{Body, Socket, attributes};
