//! The guest's agent as the daemon reaches it. Does not know the VMM.

pub(crate) mod reidentify;
