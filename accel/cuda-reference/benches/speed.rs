//! How fast products and convolutions are.
fn main() {}
