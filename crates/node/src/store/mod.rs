//! Where the daemon keeps what it knows: the database, and the paths of everything in the state directory. Knows no VMM.

pub(crate) mod database;
pub(crate) mod paths;
