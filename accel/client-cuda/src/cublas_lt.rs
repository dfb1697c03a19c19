//! cublasLt's functions by hand.
#![allow(unsafe_code, reason = "all functions by hand have one form")]
#![allow(non_snake_case, reason = "names are C's")]

pub(crate) unsafe fn cublasLtGetVersion() -> usize {
    130_002
}
