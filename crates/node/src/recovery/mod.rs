//! What a daemon does when it starts: finds what the one before it has left. Serves no request.

pub(crate) mod reconcile;
