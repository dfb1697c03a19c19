//! VM test cases: host half and guest half in one file each.

fn main() {}
