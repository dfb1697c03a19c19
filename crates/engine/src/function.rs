//! What an engine keeps of a function of the host's that its guest has. Knows no engine and no function.

use std::fmt;
use std::sync::Arc;

/// Kept for as long as a guest has a function of the host's. When it is dropped its engine forgets the function.
#[must_use = "the engine forgets the function when this is dropped"]
pub struct FunctionGuard {
    undo: Option<Arc<dyn Send + Sync>>,
}

impl FunctionGuard {
    /// Of an engine that has `undo` do what is to be done at the end when it is dropped; functions may share it.
    pub fn new(undo: Arc<dyn Send + Sync>) -> Self {
        Self { undo: Some(undo) }
    }

    /// Of an engine that has nothing to remember.
    pub fn nothing() -> Self {
        Self { undo: None }
    }
}

impl fmt::Debug for FunctionGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FunctionGuard")
            .field("kept", &self.undo.is_some())
            .finish()
    }
}
