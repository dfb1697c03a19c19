//! One process per VM. Wiring only; `catalog.rs` is the one file that names every device.

fn main() {}
