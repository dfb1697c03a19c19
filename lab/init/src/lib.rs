//! What the lab's PID 1 and the program that starts the lab have agreed on. The init itself is the binary.

pub mod contract;
