//! The contract between a VMM process and whoever drives it: plain data, validation and a thin client.
