//! Where the daemon keeps what it knows: the database, the paths of everything in the state directory, and who may look there.
//! Knows no VMM.

pub(crate) mod database;
pub(crate) mod paths;
pub(crate) mod private;
