//! Developer commands: setup steps, tidy, tests.

fn main() {}
