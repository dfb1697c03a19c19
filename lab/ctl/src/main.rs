//! Brings the lab (an emulated AMD host) up and down and runs cases in it.

fn main() {}
