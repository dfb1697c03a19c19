//! The instructions of the guests (guests.S), as bytes.
#![allow(
    unsafe_code,
    reason = "what the assembler has made is found by its symbols; each block says what it relies on"
)]

use std::arch::global_asm;

global_asm!(include_str!("guests.S"));

/// Bytes between two symbols of guests.S.
macro_rules! between {
    ($name:ident, $start:ident, $end:ident, $what:literal) => {
        #[doc = $what]
        pub(super) fn $name() -> &'static [u8] {
            unsafe extern "C" {
                static $start: u8;
                static $end: u8;
            }
            let (start, end) = (&raw const $start, &raw const $end);
            let length = end.addr() - start.addr();
            // SAFETY: 1. both symbols are in one section, in this order; 2. nobody writes to it.
            unsafe { std::slice::from_raw_parts(start, length) }
        }
    };
}

between!(server, bare_switch_server, bare_switch_server_end, "A server.");
between!(
    calls,
    bare_switch_calls,
    bare_switch_calls_end,
    "A guest that enters it, many times."
);
between!(
    beside,
    bare_switch_beside,
    bare_switch_beside_end,
    "One of several that enter it."
);
between!(once, bare_switch_once, bare_switch_once_end, "One that does so once.");
between!(
    exits,
    bare_switch_exits,
    bare_switch_exits_end,
    "One that comes out to user space."
);
between!(
    handler,
    bare_switch_handler,
    bare_switch_handler_end,
    "What takes its interrupts."
);
