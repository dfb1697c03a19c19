//! Netlink: requests to the kernel, one at a time, and what is done with links and TCP connections by them. Knows neither what
//! a link or a connection is for nor whose it is.

pub mod diag;
pub mod links;
pub mod socket;

pub use diag::{Connection, Connections};
pub use links::{Link, Links};
pub use socket::{Body, Socket, attributes};
