//! Pulls and pushes against Debian's `docker-registry` on this machine, through a proxy that breaks connections, and
//! against small servers of the tests' own where a registry would not say what a test wants to hear.

mod access;
mod bad;
mod faults;
mod kit;
mod plain;
mod server;
mod shared;
mod wire;
