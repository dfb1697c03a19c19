//! What a library's handle was told last, for functions that ask for it back. Knows no function.

use std::collections::HashMap;
use std::sync::Mutex;

use crate::lock;

/// Something that is set for a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Setting {
    /// `cublasSetMathMode`.
    MathMode,
    /// `cudnnSetStream`.
    Stream,
}

static SETTINGS: Mutex<Option<HashMap<(Setting, u32), u32>>> = Mutex::new(None);

/// What it is, if it was set.
pub(crate) fn setting(setting: Setting, handle: u32) -> Option<u32> {
    lock(&SETTINGS).as_ref()?.get(&(setting, handle)).copied()
}

/// The server has been told of it.
pub(crate) fn set(setting: Setting, handle: u32, value: u32) {
    lock(&SETTINGS).get_or_insert_default().insert((setting, handle), value);
}
