//! What this host can do: the checks behind `basalt doctor`.
