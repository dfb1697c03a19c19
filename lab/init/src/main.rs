//! PID 1 of the lab host.

fn main() {}
