//! PID 1 of a guest: mounts, reaps, runs commands, powers off.

fn main() {}
