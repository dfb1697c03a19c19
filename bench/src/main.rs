//! Figures against a peer, alternating, in one boot of the lab host.

fn main() {}
