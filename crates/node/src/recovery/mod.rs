//! What a daemon does about what went wrong: finds what the one before it has left, and waits for space where there is none. Serves
//! no request.

pub(crate) mod no_space;
pub(crate) mod reconcile;
